"""A benchmark that cannot be run here."""

from data_service.errors import UserError


class BenchError(UserError):
    """The peer is not installed, or the machine lacks what the measurement needs."""
