"""Exit codes: every error type has its own, none is success."""

from __future__ import annotations

from moestro.core import errors


def test_exit_codes_are_distinct_and_not_zero():
    kinds = [errors.MoestroError, *errors.MoestroError.__subclasses__()]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes) and 0 not in codes
