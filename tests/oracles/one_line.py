"""The shape of every error: one line that begins with what cannot be done."""

import pytest

from specbuild.errors import SpecbuildError


def problem(function, *arguments):
    """Return the line that a call is refused with."""
    with pytest.raises(SpecbuildError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("Cannot ")
    assert text.endswith(".")
    return text
