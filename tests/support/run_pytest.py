"""Run pytest in a fork of a Python that has imported, see `preloaded.py`: run_pytest.py ARGUMENTS..."""

from __future__ import annotations

import sys

import pytest

sys.exit(pytest.main())
