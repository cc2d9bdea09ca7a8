"""The licences of the embedded corpora and models are those that the packages state, and stand where users look."""

import re
from importlib import metadata

import pytest

import hf_pretrain_cli
from hf_pretrain.data.corpora import EMBEDDED_CORPORA
from hf_pretrain.data.reward_tasks import EMBEDDED_TASKS
from hf_pretrain.runtime.embedded import LICENCES, embedded_in
from hf_pretrain.weights.package_models import PACKAGE_MODELS
from tests.invariants.launching import ROOT


def test_every_corpus_and_model_has_a_licence():
    packages = {name: each.distribution for name, each in (EMBEDDED_CORPORA | PACKAGE_MODELS).items()}
    assert {name.removeprefix("embedded:"): each.package for name, each in LICENCES.items()} == packages
    assert embedded_in(["embedded"]) == {f"embedded:{name}" for name in EMBEDDED_CORPORA}
    # Arithmetic comes from no corpus.
    assert {task for task in EMBEDDED_TASKS if embedded_in([f"embedded:{task}"])} == {"answer-format"}


@pytest.mark.parametrize("name", EMBEDDED_CORPORA)
def test_the_licences_are_those_of_the_installed_packages(name):
    package, licence = LICENCES[f"embedded:{name}"]
    stated = metadata.metadata(package)
    # chatterbot-corpus names the number of clauses in its source distribution only.
    classifiers = "License :: OSI Approved :: {} License"
    assert classifiers.format(licence.partition("-")[0]) in stated.get_all("Classifier")
    assert stated["License"] in (None, licence)


@pytest.mark.documents
@pytest.mark.parametrize("page", ["docs/data.md", "docs/zh/data.md"])
def test_the_pages_name_the_licences(page):
    rows = re.findall(r"^\| `(embedded:\w+)` \| \[(.*)\]\(.*/(.*)/\) \| (.*) \|$", (ROOT / page).read_text(), re.M)
    assert rows == [(name, each.package, each.package, each.licence) for name, each in LICENCES.items()]


def test_the_command_names_the_licences(capsys):
    hf_pretrain_cli.print_list([])
    listed = capsys.readouterr().out
    assert all(f"{name} {licence} ({package})" in listed for name, (package, licence) in LICENCES.items())
