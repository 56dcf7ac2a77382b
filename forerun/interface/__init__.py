"""The contracts between host and device: plans, executors, drafters, draft models. Nothing runs
here.
"""
