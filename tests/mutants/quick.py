"""One run of the tests, as every mutant gets it: quick, bounded, and the same every time.

python -S tests/mutants/quick.py PYTEST_ARGUMENTS...
"""

import resource
import sys

import pytest
from hypothesis import settings

# A mutant may count for ever or ask for all memory, and nobody may be left who would end it.
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

settings.register_profile(
    "mutants", derandomize=True, database=None, deadline=None, max_examples=50
)
settings.load_profile("mutants")

sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *sys.argv[1:]]))
