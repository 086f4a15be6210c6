"""docs/configuration_errors.md is what the code says today."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from train.settings.configuration_errors import MISTAKES, page

PAGE = Path(__file__).parents[3] / "docs" / "configuration_errors.md"


def test_the_page_is_what_the_code_says():
    """Printed by ``python -m train.settings.configuration_errors`` in ``tests``."""
    assert len(MISTAKES) == 20 and len({mistake.title for mistake in MISTAKES}) == 20
    assert PAGE.read_text(encoding="utf-8") == page()
