"""What each command of the command line does; its flags are in `forerun.cli`."""
