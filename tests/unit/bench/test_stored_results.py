"""Results of benchmarks on disk."""

from __future__ import annotations

from pathlib import Path

from paceline.bench.stored_results import folder_of, newest, store


def test_the_newest_readable_result_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    (tmp_path / "2001-01-01T00-00-00.json").write_text('{"value": 1}')
    assert newest(tmp_path) == {"value": 1}
    path = store(tmp_path, {"value": 2})
    found = newest(tmp_path)
    assert found is not None and found["value"] == 2 and set(found["versions"]) == {"paceline", "torch", "python"}
    path.write_text("damaged")
    assert newest(tmp_path) == {"value": 1}


def test_the_name_of_a_recipe_may_contain_anything() -> None:
    assert folder_of("scaling", "my recipe/é", "0a").name == "scaling-my-recipe---0a"
