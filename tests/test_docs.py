"""The documents say what is so: their examples run, and what they name exists, with the defaults they give."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import ray
from click.testing import CliRunner
from expert_pool import cluster
from expert_pool.cluster import ExpertPool, PoolConfig, SamplingParams, load_config
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.planning.validation import validate

REPOSITORY = Path(__file__).resolve().parent.parent
FOR_READERS = ("architecture", "command-line", "configuration", "failures", "geometry", "limits", "operations")
FOR_READERS += ("python", "security")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in FOR_READERS))
MEASUREMENTS = {"docs/gpu-results.md", "docs/kill-matrix.md", "docs/soak.md"}
MAX_LINES = {"README.md": 150, "docs/architecture.md": 250}
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


def called_by(node: ast.Call) -> Any:
    """What of the pool's API a call in a document calls; `None` where it is none of that."""
    owner, _, name = ast.unparse(node.func).rpartition(".")
    return getattr(ExpertPool if owner in ("pool", "ExpertPool") else cluster, name, None) if name[0] != "_" else None


def test_every_document_is_read_here_or_is_of_measurements():
    there = {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")}
    assert there == MEASUREMENTS | {name for name in DOCUMENTS if name.startswith("docs/")}


def test_the_readme_leads_to_every_document():
    linked = set(re.findall(r"\]\(([^)#]+)", text_of("README.md")))
    assert {*DOCUMENTS, *MEASUREMENTS, "ray_configs/README.md"} - {"README.md"} <= linked


@pytest.mark.parametrize("document", MAX_LINES)
def test_what_is_read_first_is_short(document):
    assert len(text_of(document).splitlines()) <= MAX_LINES[document]


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


def test_python_in_documents_calls_what_there_is():
    """Every name imported, every method of a pool, every argument by its name."""
    wrong = []
    for document in DOCUMENTS:
        for node in (node for block in blocks(document, "python") for node in ast.walk(ast.parse(block))):
            if isinstance(node, ast.ImportFrom) and node.module == "expert_pool.cluster":
                wrong += [f"{document}: {alias.name}" for alias in node.names if alias.name not in cluster.__all__]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("pool", "ExpertPool"):
                wrong += [f"{document}: {ast.unparse(node)}"] * (not hasattr(ExpertPool, node.attr))
            elif isinstance(node, ast.Call) and (called := called_by(node)) is not None:
                parameters = inspect.signature(called).parameters
                wrong += [f"{document}: {word.arg}=" for word in node.keywords if word.arg not in parameters]
    assert wrong == []


@pytest.mark.parametrize(
    ("heading", "of"),
    [("argument", ExpertPool.launch), ("argument", ExpertPool.generate), ("of a completion", cluster.PoolCompletion)],
)
def test_tables_of_the_python_document_are_whole(heading, of):
    tables = [
        {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
        for table in re.findall(rf"^\| {heading} \|.*\n(?:\|.*\n)+", text_of("docs/python.md"), re.MULTILINE)
    ]
    if inspect.isclass(of):
        public = {name for name in dir(of) if not name.startswith("_")}
    else:
        public = inspect.signature(of).parameters.keys() - {"self", "rank_config"}
    assert public in tables


def test_the_python_document_names_every_sampling_setting_and_every_error():
    named = {word for span in code_spans("docs/python.md") for word in re.findall(r"\w+", span)}
    errors = {name for name in cluster.__all__ if name.endswith("Error")}
    assert {*SamplingParams.__struct_fields__, *errors} - named == set()


def test_a_document_shows_what_plan_prints(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "80")
    command, refused = re.findall(r"^expert-pool (plan .*)$", text_of("docs/command-line.md"), re.MULTILINE)
    assert CliRunner().invoke(main, refused.split()).exit_code == 2
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    printed = result.output.splitlines()
    [example] = blocks("docs/command-line.md", "text")
    shown = [line for line in example.splitlines() if line != "..."]
    assert [line for line in printed if line in shown] == shown
    assert not ray.is_initialized()


def test_the_ready_made_configuration_loads_and_is_the_one_that_is_shown(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = load_config(CONFIG_FILE, {})
    assert validate(config).layout.world_size == config.ranks == 2
    [shown] = blocks("docs/configuration.md", "yaml")
    assert shown in text_of(CONFIG_FILE)


def test_the_table_of_settings_has_every_setting_with_its_default():
    text = text_of("docs/configuration.md")
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
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
    sources += [*(REPOSITORY / "tests").rglob("*.py"), REPOSITORY / "Makefile"]
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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_into_a_document_lead_to_a_heading(document):
    lost = []
    for file, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text_of(document)):
        target = (REPOSITORY / document).parent / file if file else REPOSITORY / document
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        lost += [f"{file}#{anchor}"] * (anchor not in slugs)
    assert lost == []


def test_the_architecture_has_every_folder_of_the_house_with_files_that_it_holds():
    row = rf"^\| `((?:{'|'.join(HOUSE)})(?:/\w+)*)/` \| [^|]+ \| ([^|]+) \|$"
    rows = re.findall(row, text_of("docs/architecture.md"), re.MULTILINE)
    code = {path.parent for folder in HOUSE for path in (REPOSITORY / folder).rglob("*.py")}
    assert sorted(folder for folder, _ in rows) == sorted(str(path.relative_to(REPOSITORY)) for path in code)
    missing = [
        f"{folder}/{name}"
        for folder, files in rows
        for name in re.findall(r"`([^`]+)`", files)
        if not (REPOSITORY / folder / name).is_file()
    ]
    assert missing == []


def test_the_picture_of_the_architecture_has_names_of_the_code():
    [picture] = blocks("docs/architecture.md", "mermaid")
    named = set(re.findall(r"[A-Z]\w*[a-z][A-Z]\w+|(?<=\[\")[A-Z][a-z]+(?=[ \":])", picture))
    code = " ".join(path.read_text("utf-8") for folder in HOUSE for path in (REPOSITORY / folder).rglob("*.py"))
    assert len(named) > 15
    assert sorted(name for name in named if not re.search(rf"^class {name}\b", code, re.MULTILINE)) == []


def test_functions_of_the_decode_step_are_in_the_files_named_beside_them():
    text = " ".join(text_of("docs/architecture.md").split())
    step = text[text.index("## One decode step") : text.index("## Who imports whom")]
    named = re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`(?: \(|, )`([a-z_/]+\.py)`", step)
    assert len(named) > 20
    absent = []
    for name, path in named:
        source = (REPOSITORY / path).read_text("utf-8")
        owner, _, function = name.rpartition(".")
        patterns = [rf"^class {owner}\b"] * bool(owner) + [rf"^ *(?:async )?(?:def|class) {function}\b"]
        absent += [f"{name} in {path}" for one in patterns if not re.search(one, source, re.MULTILINE)]
    assert absent == []


@pytest.mark.parametrize(
    "document", ["README.md", *(f"docs/{name}.md" for name in ("command-line", "configuration", "operations"))]
)
def test_options_in_a_document_are_options_of_the_command_line(document):
    options = [one for command in (main, *main.commands.values()) for one in command.params]
    known = {option for one in options for option in (*one.opts, *one.secondary_opts)}
    commands = re.findall(
        r"^(?:.* -- )?(expert-pool .*)|`(--[^`]*|expert-pool [^`]*)`", text_of(document), re.MULTILINE
    )
    commands = ["".join(found) for found in commands]
    named = {option for command in commands for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command)}
    assert named
    assert named - known - {"--help"} == set()


def test_values_named_for_a_setting_are_its_values():
    from expert_pool.dispatch.budgets.limits import DisaggregationMode, SpeculativeAlgorithm
    from expert_pool.dispatch.registry import dispatch_names, experts_names

    text = text_of("docs/configuration.md")
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE))
    for name, known in (
        ("dispatch", dispatch_names()),
        ("experts", experts_names()),
        ("limits.disaggregation_mode", get_args(DisaggregationMode)),
        ("limits.speculative_algorithm", get_args(SpeculativeAlgorithm)),
    ):
        named = set(re.findall(r"`(\w+)`", rows[name]))
        assert named <= set(known), name
