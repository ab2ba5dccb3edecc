"""How a node gets onto a machine: what the files for that name exists, and their parts fit."""

from __future__ import annotations

import configparser
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from packaging.version import Version

from hastore import __version__
from hastore.config.file import edit_role, load_config
from hastore.config.model import Config, Mode, Role
from hastore.server.http_server import OPEN_PATHS
from tests.documents.blocks import PAGES
from tests.test_named_commands import commands_of, problem_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CONTAINER, KUBERNETES = DEPLOY / "container", DEPLOY / "kubernetes"
MODULES = sorted((ROOT / "hastore").rglob("*.py"))
FILES = [
    path
    for folder in (CONTAINER, KUBERNETES, DEPLOY / "systemd", DEPLOY / "airflow")
    for path in folder.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
DOCUMENT = (ROOT / "docs" / "deployment.md").read_text()
GROUPS = ("pair", "dledger")
MANIFESTS = ("classic", "dledger")
SECRET = "c2VjcmV0IG9mIDMyIHJhbmRvbSBieXRlcw=="
HOME = "/var/lib/hastore"
RELEASE = __version__.partition(".dev")[0]


def manifest(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of a manifest by kind and name."""
    found = yaml.safe_load_all((KUBERNETES / f"{name}.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def pod_of(name: str) -> dict[str, Any]:
    return dict(manifest(name)["StatefulSet", "hastore"]["spec"]["template"]["spec"])


def test_every_file_is_described_and_all_yaml_can_be_read() -> None:
    for path in FILES:
        assert path.name in DOCUMENT, path
        if path.suffix == ".yaml":
            assert [*yaml.safe_load_all(path.read_text())], path


@pytest.mark.parametrize("name", GROUPS)
def test_a_node_comes_back_after_a_reboot(name: str) -> None:
    """Docker starts containers with `on-failure` after a failure only, not with its daemon."""
    services = yaml.safe_load((CONTAINER / f"{name}.compose.yaml").read_text())["services"]
    assert {one["restart"] for one in services.values()} == {"unless-stopped"}


def test_the_commands_in_them_exist() -> None:
    found = {path: commands_of(path) for path in FILES}
    assert sum(map(len, found.values())) > 1
    wrong = [(line, why) for each in found.values() for line in each if (why := problem_of(line))]
    assert wrong == []


def test_the_image_starts_a_node_and_asks_it_for_its_health() -> None:
    text = (CONTAINER / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["hastore", "serve"]' in text and problem_of("hastore serve -c FILE") is None
    assert "\nUSER 10001:10001\n" in text and "STOPSIGNAL SIGTERM" in text
    for source in re.findall(r"^COPY ((?:(?!--from).)*)$", text, re.MULTILINE):
        *sources, _ = source.split()
        assert all((ROOT / one).exists() for one in sources), source
    assert b"/healthz" in OPEN_PATHS and "/healthz" in (CONTAINER / "healthcheck.py").read_text()
    extras = re.findall(r'"\.\[(.*)\]"', text)[0].split(",")
    setup = (ROOT / "setup.cfg").read_text()
    assert all(re.search(rf"^{one} =$", setup, re.MULTILINE) for one in extras)


def test_no_page_installs_hastore_by_its_name_alone() -> None:
    """It is not on PyPI, so pip would find nothing there, or what somebody else has put there."""
    pages = {page: (ROOT / page).read_text() for page in PAGES}
    new = re.findall(r"/opt/hastore/bin/pip install .*", "".join(pages.values()))
    assert len(new) == 4 and all('"${wheel}[' in line for line in new), new
    for place, text in [*pages.items(), *((one, one.read_text()) for one in MODULES)]:
        assert not re.search(r"--upgrade '?\"?hastore", text), f"{place}: it is sought on PyPI"
    assert 'install "${wheel}[spark]"' in pages["docs/pipeline.md"]
    upgrade = pages["docs/runbook.md"].partition("## An upgrade")[2]
    assert "(deployment.md#a-wheel)" in upgrade.partition("\n## ")[0]


def test_a_build_of_a_commit_has_a_number_of_its_own(tmp_path: pathlib.Path) -> None:
    """pip leaves an installed wheel of the same number, with exit code 0 and the old code."""
    source = tmp_path / "source"
    (source / "hastore").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", source)
    shutil.copy(ROOT / "hastore" / "__init__.py", source / "hastore")
    (source / "setup.cfg").write_text("[metadata]\nname = hastore\n[options]\npackages = hastore\n")
    plain = {name: value for name, value in os.environ.items() if name != "HASTORE_VERSION"}

    def run(*command: str, **env: str) -> str:
        done = subprocess.run(
            command, cwd=source, env=plain | env, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(when: str) -> str:
        run("git", "add", ".")
        given = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", **given)
        return run("git", "log", "-1", "--format=%h", "--abbrev=8")

    asked = (sys.executable, "setup.py", "--version")
    assert run(*asked) == "0.1.0.dev0" == __version__, "there is no git here"
    run("git", "init", "-q")
    first = commit("2026-11-30T23:59:59-02:00")
    assert run(*asked) == f"0.1.0.dev20261201015959+g{first}"
    with (source / "setup.cfg").open("a") as file:
        file.write("\n")
    assert run(*asked) == f"0.1.0.dev20261201015959+g{first}.changed"
    second = commit("2026-12-01T02:00:01+00:00")
    built = f"0.1.0.dev20261201020001+g{second}"
    assert Version(f"0.1.0.dev20261201015959+g{first}") < Version(built) < Version("0.1.0")
    run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", "made")
    assert f'__version__ = "{built}"' in (source / "made" / "hastore" / "__init__.py").read_text()
    assert run("git", "diff", "--stat") == "", "a build has changed the source"
    assert run(*asked, HASTORE_VERSION="7.1") == "7.1"


def test_a_wheel_has_every_file_that_is_no_module() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = [one.strip() for one in setup["options.package_data"]["hastore"].split(",")]
    package = ROOT / "hastore"
    others = [one for one in package.rglob("*") if one.is_file() and "__pycache__" not in one.parts]
    for path in others:
        name = path.relative_to(package)
        assert path.suffix == ".py" or any(map(name.match, patterns)), name


def test_the_lowest_versions_are_those_that_do_what_commands_promise() -> None:
    """With click 8.1 `hastore log` alone ended with 0, and its help was data on stdout; with rich
    14.2 a bar that is hidden wrote an empty line to stderr, before the one line of an error.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = setup["options"]["install_requires"].split()
    assert {"click>=8.2", "rich>=14.3"} <= set(wanted)


@pytest.mark.parametrize("name", GROUPS)
def test_the_compose_files_have_a_node_for_each_service(name: str) -> None:
    compose = yaml.safe_load((CONTAINER / f"{name}.compose.yaml").read_text())
    services = compose["services"]
    configs: dict[int, Config] = {}
    for service, settings in services.items():
        folder, at = settings["volumes"][0].split(":")
        volume, store = settings["volumes"][1].split(":")
        assert at == "/etc/hastore" and volume in compose["volumes"] and store == HOME
        config = load_config(str(CONTAINER / folder / "node.yaml"))
        configs[config.node] = config
        assert config.store.root.startswith(f"{store}/")
        own = config.nodes[config.node]
        assert own.api == f"tcp://{service}:10911" and settings["hostname"] == service
        assert config.bound("http") == "0.0.0.0:10913" and config.bound("ha") == "0.0.0.0:10912"
        (published,) = settings["ports"]
        assert re.fullmatch(r"127\.0\.0\.1:\d+:10913", published)
        assert settings["image"] == f"localhost/hastore:{RELEASE}"
        bootstrap = settings["environment"]["HASTORE_BOOTSTRAP"].split(",")
        assert [one.api.removeprefix("tcp://") for one in config.nodes.values()] == bootstrap
    assert len({str(sorted(config.nodes)) for config in configs.values()}) == 1
    assert sorted(configs) == sorted(configs[1].nodes)
    if name == "pair":
        assert [configs[n].role for n in (1, 2)] == [Role.SYNC_MASTER, Role.SLAVE]
    else:
        assert {config.mode for config in configs.values()} == {Mode.DLEDGER}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_objects_of_a_manifest_belong_together(name: str) -> None:
    objects = manifest(name)
    group = objects["StatefulSet", "hastore"]["spec"]
    labels = group["template"]["metadata"]["labels"]
    assert group["selector"]["matchLabels"] == labels == {"app": "hastore"}
    nodes = objects["Service", "hastore-nodes"]["spec"]
    clients = objects["Service", "hastore"]["spec"]
    assert group["serviceName"] == "hastore-nodes" and nodes["clusterIP"] == "None"
    assert nodes["publishNotReadyAddresses"], "a node is ready only once it has found the others"
    assert nodes["selector"] == clients["selector"] == labels
    budget = objects["PodDisruptionBudget", "hastore"]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["maxUnavailable"] == (0 if name == "classic" else 1)
    assert group["updateStrategy"]["type"] == ("OnDelete" if name == "classic" else "RollingUpdate")
    pod = group["template"]["spec"]
    (node,), (configure,) = pod["containers"], pod["initContainers"]
    volumes = {one["name"] for one in pod["volumes"]} | {
        one["metadata"]["name"] for one in group["volumeClaimTemplates"]
    }
    for container in (node, configure):
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
        assert container["image"] == f"hastore:{RELEASE}"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsUser"] == 10001 and pod["securityContext"]["runAsNonRoot"]
    probes = {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    for probe, path in probes.items():
        assert node[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "http"}
        assert path.encode() in OPEN_PATHS
    ports = {one["name"]: one["containerPort"] for one in node["ports"]}
    assert ports == {"api": 10911, "ha": 10912, "http": 10913}
    assert {one["name"]: one["port"] for one in nodes["ports"]} == ports
    env = {one["name"]: one.get("value") for one in configure["env"]}
    assert env["NUMBERS"].split(",") == [str(one + 1) for one in range(group["replicas"])]
    assert env["HOME"] == HOME
    assert env["DOMAIN"].startswith("hastore-nodes.$(NAMESPACE).")


@pytest.fixture
def started(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What configures a pod: call it with a manifest and an ordinal; it returns the file's path."""

    def configure(name: str, ordinal: int, numbers: str = "") -> pathlib.Path:
        data = manifest(name)["ConfigMap", "hastore"]["data"]
        home, here = tmp_path / f"home{ordinal}", tmp_path / "config"
        for folder in (home, here):
            folder.mkdir(exist_ok=True)
        for file, text in data.items():
            (here / file).write_text(text.replace(HOME, str(home)))
        (configure,) = pod_of(name)["initContainers"]
        env = {one["name"]: one.get("value") for one in configure["env"]}
        env |= {"POD_NAME": f"hastore-{ordinal}", "CONFIG": str(here), "HOME": str(home)}
        env |= {"DOMAIN": "hastore-nodes.shop.svc.cluster.local", "HA_SECRET": SECRET}
        env |= {"NUMBERS": numbers or env["NUMBERS"]}
        for key, value in env.items():
            monkeypatch.setenv(key, value or "shop")
        runpy.run_path(str(here / "configure.py"))
        (node,) = pod_of(name)["containers"]
        assert node["args"] == ["-c", f"{HOME}/node.yaml"]
        return home / "node.yaml"

    yield configure


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_gets_a_file_of_its_own(started: Any, name: str) -> None:
    replicas = manifest(name)["StatefulSet", "hastore"]["spec"]["replicas"]
    for ordinal in range(replicas):
        config = load_config(str(started(name, ordinal)))
        assert config.node == ordinal + 1 and len(config.nodes) == replicas
        host = f"hastore-{ordinal}.hastore-nodes.shop.svc.cluster.local"
        assert config.nodes[config.node].api == f"tcp://{host}:10911"
        assert config.bound("api") == "tcp://0.0.0.0:10911"
        assert config.role is (Role.SLAVE if name == "classic" else None)


def test_kubernetes_makes_no_master_and_keeps_the_operators_role(started: Any) -> None:
    path = started("classic", 0)
    assert load_config(str(path)).role is Role.SLAVE
    edit_role(str(path), Role.SYNC_MASTER)
    assert started("classic", 0) == path
    config = load_config(str(path))
    assert config.role is Role.SYNC_MASTER and config.ha.secret_file is not None
    assert pathlib.Path(config.ha.secret_file).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_power_loss_takes_no_pods_file(
    started: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role is nowhere else, and an empty file would keep the pod from starting for ever."""
    synced, renamed = set[int](), list[int]()
    sync, replace = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def durably(source: Any, target: Any, **options: Any) -> None:
        renamed.append(os.stat(source).st_ino)
        assert renamed[-1] in synced, f"{target} is not on the disk"
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", durably)
    path = started(name, 0)
    assert {path.stat().st_ino, path.with_name("secret").stat().st_ino} <= {*renamed}
    assert path.parent.stat().st_ino in synced


def test_a_node_whose_volume_is_lost_gets_another_number(started: Any) -> None:
    for ordinal, number in ((0, 3), (1, 2)):
        config = load_config(str(started("classic", ordinal, "3,2")))
        assert config.node == number and sorted(config.nodes) == [2, 3]
        assert config.nodes[number].ha.startswith(f"hastore-{ordinal}.")


def test_an_update_of_a_pair_waits_for_what_comes() -> None:
    """Of a pair no node may be stopped without puts being refused: can-stop never says yes."""
    text = " ".join(DOCUMENT.split())
    update = text.partition("- **Updates.**")[2].partition("### ")[0]
    assert "until both are in sync again (`kubectl exec hastore-0 -- hastore status" in update
    assert problem_of("hastore status --wait 600") is None
    assert "until `hastore can-stop`" not in text
