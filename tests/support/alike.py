"""Samples that must be the same, byte for byte."""

from dataclasses import fields

import numpy as np

from data_service.samples.samples import Samples


def assert_same(left: Samples, right: Samples) -> None:
    for field in fields(Samples):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours is None or ours.dtype == theirs.dtype
