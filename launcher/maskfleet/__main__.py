"""The command `maskfleet`, also as `python -m maskfleet`. The package, imported first, has cleared its way."""

from launcher.app.console import main

if __name__ == "__main__":
    main()
