"""What every study says about its settings, and that run folders are named as ever."""

import hashlib

import pytest
import tomli_w

from curvescope.core.errors import UsageError
from curvescope.runs.study import Study
from curvescope.studies import STUDIES, find
from curvescope.studies.problem_config import ModelOnData

DIGESTS = {  # of the default settings, as run folders of before have them
    "spectrum": "642f8a79",  # with `sampling`, `unit` and `operators`
    "hvp": "7fb62f37",
    "embeddings": "e59e2415",
    "probes": "1bb14fb0",
    "heads": "ccdfba91",
    "trajectory": "2c2ae57c",
    "layernorm": "190d6298",
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_setting_says_what_it_means(name):
    study = find(name)
    assert isinstance(study, Study)
    for setting in study.Config.settings():
        assert setting.meaning, setting.name
        assert setting.kind, setting.name


@pytest.mark.parametrize("name", DIGESTS)
def test_the_settings_of_a_run_folder_are_written_as_ever(name):
    text = tomli_w.dumps(find(name).Config().to_dict())
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == DIGESTS[name]


def test_an_engine_that_is_not_known_is_refused_by_the_settings():
    with pytest.raises(UsageError, match="'fats'"):
        ModelOnData.from_dict({"engine": "fats"})
