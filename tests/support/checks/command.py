"""The command line in this process."""

from typer.testing import CliRunner

from launcher.app.cli.main import app


def maskfleet(*arguments: object) -> str:
    """What `maskfleet ARGUMENTS` prints. It must end well; what it raises is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
