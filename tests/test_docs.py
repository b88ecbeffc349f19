"""The documents say what is so: their examples run, and what they name exists, with the defaults they give."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import PoolConfig, load_config
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.planning.validation import validate

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
DOCUMENTS += ("docs/architecture.md", "docs/geometry.md", "docs/operations.md", "docs/security.md")
HOUSE = ("cluster", "workers", "graphs", "dispatch")
CONFIG_FILE = "ray_configs/local_two_ranks.yaml"


def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text("utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


def code_spans(document: str) -> list[str]:
    without_blocks = re.sub(r"^```.*?^```$", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", without_blocks)


def settings(kind: Any = PoolConfig, prefix: str = "") -> dict[str, Any]:
    """Every setting of a pool by its path in a file, with its default."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= settings(field.type, f"{prefix}{field.name}.")
        else:
            has_factory = field.default_factory is not msgspec.NODEFAULT
            found[prefix + field.name] = field.default_factory() if has_factory else field.default
    return found


def test_the_readme_example_prints_what_the_readme_shows():
    """In a process of its own, as a reader runs it, in a Ray session that holds its two ranks and nothing else."""
    [example] = blocks("README.md", "python")
    expected = blocks("README.md", "text")[0]
    session = "import ray\nray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
    result = subprocess.run(
        [sys.executable, "-c", session + example], cwd=REPOSITORY, capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(expected.splitlines())


def test_the_readme_shows_what_plan_prints(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "80")
    command, refused = re.findall(r"^expert-pool (plan .*)$", text_of("README.md"), re.MULTILINE)
    assert CliRunner().invoke(main, refused.split()).exit_code == 2
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    printed = result.output.splitlines()
    shown = [line for line in blocks("README.md", "text")[1].splitlines() if line != "..."]
    assert [line for line in printed if line in shown] == shown
    assert not ray.is_initialized()


def test_the_ready_made_configuration_loads_and_is_the_one_in_the_readme(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = load_config(CONFIG_FILE, {})
    assert validate(config).layout.world_size == config.ranks == 2
    [shown] = blocks("README.md", "yaml")
    assert shown in text_of(CONFIG_FILE)


def test_the_table_of_settings_has_every_setting_with_its_default():
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \| [^|]+ \|$", text_of("README.md"), re.MULTILINE)
    shown = {name: default.strip().strip("`") for name, default in rows}
    known = settings()

    def as_written(default: Any) -> str:
        if default is msgspec.NODEFAULT:
            return "required"
        if default is None:
            return "unset"
        return str(default).lower() if isinstance(default, bool) else str(default)

    assert shown == {name: as_written(default) for name, default in known.items()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_named_in_a_document_exist(document):
    sections = {name.partition(".")[0] for name in settings() if "." in name}
    named = [span for span in code_spans(document) if re.fullmatch(rf"({'|'.join(sections)})\.[a-z_]+", span)]
    files = {path.name for folder in HOUSE for path in (REPOSITORY / folder).rglob("*.py")}
    assert [name for name in named if name not in settings() and name not in files] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_a_document_exist_in_the_code(document):
    """Functions, classes, settings, tests: whatever has an underscore or is in capitals within, in code font."""
    sources = [*(path for folder in HOUSE for path in (REPOSITORY / folder).rglob("*.py"))]
    sources += [*(REPOSITORY / "tests").glob("*.py"), REPOSITORY / "Makefile"]
    words = set(re.findall(r"\w+", " ".join(path.read_text("utf-8") for path in sources)))
    words |= {path.stem for path in sources}
    named = {
        word
        for span in code_spans(document)
        if "/" not in span
        for word in re.findall(r"\w+", span)
        if re.fullmatch(r"[a-z0-9]+(_[A-Za-z0-9]+)+|[A-Z][a-z]+([A-Z][a-z]+)+|[A-Z]+(_[A-Z]+)+", word)
    }
    assert sorted(named - words) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_targets_named_in_a_document_exist(document):
    text = text_of(document)
    linked = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("https://")]
    assert [link for link in linked if not (REPOSITORY / document).parent.joinpath(link).exists()] == []
    paths = [span for span in code_spans(document) if re.fullmatch(r"[\w.]+/[\w./]*", span)]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }


def test_rooms_in_the_architecture_are_files_of_the_house():
    folder, missing = "", []
    for line in text_of("docs/architecture.md").splitlines():
        if match := re.match(rf"`((?:{'|'.join(HOUSE)})(?:/\w+)*)/`", line):
            folder = match[1]
        elif folder and (match := re.match(r"\| ((?:`[a-z0-9_]+`(?:, )?)+) \|", line)):
            missing += [
                name for name in re.findall(r"`(\w+)`", match[1]) if not (REPOSITORY / folder / f"{name}.py").is_file()
            ]
    assert folder == HOUSE[0]
    assert missing == []


@pytest.mark.parametrize("document", ["README.md", "docs/operations.md"])
def test_options_in_a_document_are_options_of_the_command_line(document):
    known = {option for command in (main, *main.commands.values()) for one in command.params for option in one.opts}
    commands = re.findall(
        r"^(?:.* -- )?(expert-pool .*)|`(--[^`]*|expert-pool [^`]*)`", text_of(document), re.MULTILINE
    )
    commands = ["".join(found) for found in commands]
    named = {option for command in commands for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command)}
    assert named
    assert named - known == set()


def test_values_named_for_a_setting_are_its_values():
    from expert_pool.dispatch.budgets.limits import (
        DisaggregationMode,
        DispatchKind,
        ExpertsKind,
        SpeculativeAlgorithm,
    )

    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| [^|]+ \| ([^|]+) \|$", text_of("README.md"), re.MULTILINE))
    for name, kind in (
        ("dispatch", DispatchKind),
        ("experts", ExpertsKind),
        ("limits.disaggregation_mode", DisaggregationMode),
        ("limits.speculative_algorithm", SpeculativeAlgorithm),
    ):
        named = set(re.findall(r"`(\w+)`", rows[name]))
        assert named <= set(get_args(kind)), name
