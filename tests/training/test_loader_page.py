from __future__ import annotations

import pytest
from test_docs import DOCS, run_page

pytestmark = pytest.mark.skipif(not (DOCS / "index.md").exists(), reason="the tests run without the documentation")


def test_the_examples_of_the_training_page_run(tmp_path):
    run_page("docs/training.md", tmp_path, with_torch=True)
