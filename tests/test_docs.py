"""The pages against the code: links lead somewhere, commands have the options they are shown with, and no option goes untold."""

import itertools
import re
import shlex
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dsjax.cli.main import COMMANDS, app
from dsjax.config import load_config
from dsjax.engine.setup.fitting import check_layout
from sharding import MeshSpec

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("[RC]*.md"), ROOT / "deploy" / "README.md", *(ROOT / "docs").rglob("*.md")])
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
COMMAND = re.compile(
    r"(?:python -m dsjax\.|(?<![\w./-])dsjax )((?:bench |kernels |plan (?=(?:fit|recipe|search|simulate|step)\b))?[a-z]+)\b([^`\n]*)"
)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Command, as typed behind `dsjax`, to its flags."""
    root, found = get_command(app), {}
    for name in COMMANDS:
        command = root.get_command(None, name)
        parts = {f"{name} {part}": command.get_command(None, part) for part in getattr(command, "commands", ())}
        for path, one in (parts or {name: command}).items():
            flags = {flag for parameter in one.params for flag in (*parameter.opts, *parameter.secondary_opts)}
            found[path] = {flag for flag in flags if flag.startswith("--")}
    return found | {"plan": found["plan search"]}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{named(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_shown_with_options_that_they_have(page, options):
    text = TEXTS[page].replace("\\\n", " ")
    for command, rest in COMMAND.findall(text):
        shown = re.split(r"#|;| \| ", rest)[0]
        unknown = set(FLAG.findall(shown)) - options[command] if command in options else set()
        assert not unknown - {"--help"}, f"dsjax {command}{shown}"


def test_every_option_is_named_on_some_page(options):
    told = {flag for text in TEXTS.values() for flag in FLAG.findall(text)}
    for command, flags in options.items():
        untold = {one for one in flags - told if not told & {one.replace("--no-", "--"), one.replace("--", "--no-")}}
        assert not untold, f"dsjax {command}: no page names {', '.join(sorted(untold))}"


def test_every_alert_is_named_on_the_page_of_observability():
    alerts = re.findall(r"alert: (\w+)", (ROOT / "configs/observability/alerts.yml").read_text(encoding="utf-8"))
    text = TEXTS[ROOT / "docs" / "observability.md"]
    assert alerts
    assert not [name for name in alerts if f"`{name}`" not in text]


def test_the_index_lists_every_page():
    pages = (ROOT / "docs").glob("*.md")
    text = TEXTS[ROOT / "docs" / "README.md"]
    assert not [page.name for page in pages if page.name != "README.md" and f"({page.name})" not in text]


def commits(text: str) -> set[str]:
    """Return the commits of this repository that a page names: hexadecimal words, except in `owner/name, FILE, commit HASH`."""
    found = set()
    for match in re.finditer(r"(?<![\w.#/%-])([0-9a-f]{7,40})(?![\w-])", text):
        word, before = match[1], text[max(0, match.start() - 250) : match.start()]
        if word.isdigit() and not re.search(r"(committed|commit) \(?([0-9a-f]{7,}, )*$", before):
            continue
        if re.search(r"[\w.-]+/[\w.-]+[^\n|]*commit $", before.replace("\n  ", " ")) or word.isalpha():
            continue
        found.add(word)
    return found


def test_every_commit_that_a_page_names_exists():
    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240)

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the repository's whole history")
    said = {(named(page), commit) for page, text in TEXTS.items() for commit in commits(text)}
    assert len(said) >= 5, "the pages name some"
    missing = [pair for pair in sorted(said) if git("merge-base", "--is-ancestor", pair[1], "HEAD").returncode]
    assert not missing


def shown_commands(text: str) -> list[list[str]]:
    """The words of each `dsjax` command in the blocks of a page, without those that leave something out (…)."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        values = dict(re.findall(r'^(?:export )?([A-Z]+)="(.*)"$', block, re.MULTILINE))
        for line in block.replace("\\\n", " ").splitlines():
            line = string.Template(line.removeprefix("$ ")).safe_substitute(values)
            if match := re.match(r"(?:.* && )?(?:dsjax |(?:\S*/)?python3? -m dsjax[. ])(?=[a-z])(.*)", line):
                words = shlex.split(match[1], comments=True)
                found.append(list(itertools.takewhile(lambda word: word not in ("&", "|", "&&", ">"), words)))
    return [words for words in found if not any("…" in word or word[0] == "[" for word in words)]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_of_a_page_parse(page):
    for words in shown_commands(TEXTS[page]):
        command, path = get_command(app), list(words)
        while path and path[0] in getattr(command, "commands", ()):
            command = command.get_command(None, path.pop(0))
        try:
            command.make_context("dsjax", path)
        except Exception as error:
            if not hasattr(error, "format_message"):  # which errors of click have, and of typer's copy of it
                raise
            pytest.fail(f"dsjax {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_meshes_of_commands_fit_the_model(page):
    text = TEXTS[page].replace("\\\n", " ")
    for command, rest in COMMAND.findall(text):
        shown = re.split(r"#|;| \| ", rest)[0]
        model = re.search(r"--model (\S+)", shown)
        folder = ROOT / "configs" / "models" / (model[1] if model else "demo")
        if command not in ("serve", "generate", "dryrun", "dynamo", "bench step") or not folder.exists():
            continue
        redundant = re.search(r"--redundant-experts (\d+)", shown)
        for spec in re.findall(r"--(?:prefill-|decode-)?mesh ([^\s…]+)", shown):
            mesh, copies = MeshSpec.parse(spec), int(redundant[1]) if redundant else 0
            check_layout(load_config(folder), mesh.stage, copies, "bf16")


DEPLOYED = [ROOT / "README.md", ROOT / "deploy" / "README.md", ROOT / "docs" / "deployments.md"]
SHOWN = {tuple(words) for page in DEPLOYED for words in shown_commands(TEXTS[page])}
PLANS = sorted(words for words in SHOWN if words[0] == "plan")


@pytest.mark.slow
@pytest.mark.parametrize("words", PLANS, ids=shlex.join)
def test_plans_of_the_pages_on_deployments_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{done.output}{done.exception}"
