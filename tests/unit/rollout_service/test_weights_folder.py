"""An old weights folder stays until the engines that start from it are through."""

from __future__ import annotations

from pathlib import Path

from rollout_service.weights_folder import held, remove_unless_held


def test_a_folder_is_removed_once_its_last_reader_is_through(tmp_path: Path) -> None:
    folder = tmp_path / "v3"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    with held(folder, "engine-0") as first:
        with held(folder, "engine-1") as second:
            assert first and second
            assert not remove_unless_held(folder)
        assert not remove_unless_held(folder)
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert remove_unless_held(folder)
    assert remove_unless_held(folder)  # it is gone already
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_cannot_be_held(tmp_path: Path) -> None:
    with held(tmp_path / "v3", "engine-0") as found:
        assert not found
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_lets_go(tmp_path: Path) -> None:
    folder = tmp_path / "v3"
    folder.mkdir()
    try:
        with held(folder, "engine-0"):
            raise RuntimeError("the server did not start")
    except RuntimeError:
        pass
    assert remove_unless_held(folder)
