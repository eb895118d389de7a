"""Scenes: short runs by hand that the reference plays as they are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker import engines
from kvclaims.checker.mutatecode import survives_fuzzing
from kvclaims.checker.recorded import play
from kvclaims.checker.scenes import Scene, scenes
from kvclaims.spec.interface import BadOperation, NotExposed
from kvclaims.spec.operations import perform

SCENES = scenes()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.shows)
def test_every_operation_of_a_scene_is_taken_and_allowed(scene: Scene) -> None:
    engine = engines.find("reference")
    if not scene.operations:
        with pytest.raises(NotExposed):
            engine.open(scene.config, "scene")
        return
    runtime = engine.open(scene.config, "scene")
    for number, operation in enumerate(scene.operations):
        if number in scene.refused:
            with pytest.raises(BadOperation):
                perform(runtime, operation)
        else:
            perform(runtime, operation)
    assert survives_fuzzing([play(engine, 0, scene)], engine) is None


def test_each_scene_shows_something_else() -> None:
    assert len({scene.shows for scene in SCENES}) == len(SCENES)


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "[[scene]]\nshows = 'a'\npool = {usable = 0}\ndo = []\n",
        "[[scene]]\nshows = 'a'\npool = {blocks = 4}\ndo = []\n",
        "[[scene]]\nshows = 'a'\npool = {usable = 4}\ndo = [{op = 'fly'}]\n",
    ],
)
def test_a_bad_file_of_scenes_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "scenes.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadOperation, match=r"scenes\.toml"):
        scenes(file)
