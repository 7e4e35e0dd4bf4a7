"""Fixtures of the tests of forms."""

import pytest

from triton_device import triton_device

device = pytest.fixture(triton_device, scope="module")
