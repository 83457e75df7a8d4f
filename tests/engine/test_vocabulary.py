"""A tokenizer that was given beside the model may be another model's."""

import logging

import pytest

from oneloop.config import ModelConfig
from oneloop.engine.assembly import _check_vocabulary
from oneloop.errors import ConfigError

GIVEN, OWN = ModelConfig(tokenizer="other"), ModelConfig()


def test_one_that_knows_more_than_the_model_is_refused():
    with pytest.raises(ConfigError, match="tokenizer: other has 101 tokens, and the model knows 100"):
        _check_vocabulary(GIVEN, 101, 100)


@pytest.mark.parametrize(
    ("config", "known", "is_told"),
    [(GIVEN, 99, True), (GIVEN, 100, False), (OWN, 101, True), (OWN, 100, False), (OWN, 99, False)],
    ids=["given-smaller", "given", "own-larger", "own", "own-padded"],
)
def test_what_may_be_a_mistake_is_told(caplog, config, known, is_told):
    with caplog.at_level(logging.WARNING):
        _check_vocabulary(config, known, 100)
    assert bool(caplog.records) == is_told
