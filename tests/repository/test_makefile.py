"""Makefile: the first line of a set-up is ours, and an installation that failed is not kept."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.training_runs import ROOT


@pytest.fixture
def environment(tmp_path):
    """An environment whose pip writes down its arguments, and fails if a file `broken` exists."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    pip = (
        f'echo "$@" >> {tmp_path}/calls; [ ! -e {tmp_path}/broken ] || {{ echo no space; exit 1; }}'
    )
    for name, does in {"pip": pip, "ruff": "echo checked"}.items():
        script = folder / "bin" / name
        script.write_text(f"#!/bin/sh\n{does}\n")
        script.chmod(0o755)
    return folder


def lint(environment: Path) -> subprocess.CompletedProcess:
    variables = [f"VENV={environment}", "CONSTRAINTS=-c constraints.txt"]
    command = ["make", "--no-print-directory", "lint", *variables]
    outside = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)


def test_the_first_line_of_a_setup_says_what_it_does_and_pip_is_quiet(environment, tmp_path):
    first = lint(environment)
    assert first.returncode == 0, first.stderr
    installing, *others = first.stdout.splitlines()
    assert installing.startswith("Installing requirements-lint.txt into") and "GB" in installing
    assert not any("pip" in line for line in others) and "checked" in others
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--quiet" in call and "-r requirements-lint.txt -c constraints.txt" in call
    again = lint(environment)
    assert "Installing" not in again.stdout and again.returncode == 0


def test_an_installation_that_failed_shows_why_and_is_tried_again(environment, tmp_path):
    (tmp_path / "broken").touch()
    failed = lint(environment)
    assert failed.returncode and "no space" in failed.stdout and "checked" not in failed.stdout
    (tmp_path / "broken").unlink()
    assert "Installing" in lint(environment).stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
