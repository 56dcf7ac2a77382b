"""The compiling process of tests: no grammar counts as expensive because a machine is slow or
busy. What reaches a limit does.
"""

from forerun.constrain.isolation import llguidance_worker

llguidance_worker.SLOW = 8000.0

if __name__ == "__main__":
    llguidance_worker.main()
