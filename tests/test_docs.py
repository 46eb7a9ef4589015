"""README and docs/ hold what they say: code runs, commands and files exist, links lead somewhere, notebooks print what
their files hold.

The ```python blocks of one page are one program, run from top to bottom in an empty folder. What a page needs
but does not show (a stand-in for the Hub, say) stands in tests/docs_setup/, in a file named after the page:
docs/guides/hub.md has tests/docs_setup/guides_hub.py, README.md has README.py; it runs first, in the same
program, and may import from tests.
"""

import ast
import inspect
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mouse_core.errors import AlignmentWarning
from scripts.house import ALL, ROOT, parse, statements
from scripts.notebooks import NOTEBOOKS, cells_of, code_of, execute, outputs_of
from tests.programs import run_program

TOP = [path for path in (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")) if path.exists()]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
SETUP = ROOT / "tests" / "docs_setup"
# Guides whose `text` blocks are held to what their code prints; others that need a setup do so there.
HELD = ("bad-input", "chat", "maps", "minari", "mixtures", "ragged", "specs", "text", "trees", "windows-by-field")
CHECKED = [f"docs/guides/{name}.md" for name in HELD]

# Languages that a block may name. Python is written `python`, so that no block escapes under another name.
LANGUAGES = {"python", "bash", "text", "toml", "yaml", "json"}
IMPORTS_TORCH = re.compile(r"^ *(?:import|from) (?:mouse_)?torch\b", flags=re.MULTILINE)
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>.*?)[ \t]*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands after its fence, the line its code begins at (from 1), and the code."""

    info: str
    line: int
    code: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if opened is None:
            if match:
                opened, body = (match["fence"], match["info"], number + 1), []
        elif match and not match["info"] and match["fence"].startswith(opened[0]):
            found.append(Block(opened[1], opened[2], textwrap.dedent("\n".join(body) + "\n")))
            opened = None
        else:
            body.append(line)
    assert opened is None, f"the block that begins at line {opened and opened[2]} is never closed"
    return found


def program(text: str) -> str:
    """The page's Python as one file, each line where it stands in the page: tracebacks point there."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python":
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def setup_of(page: Path) -> Path:
    base = ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT
    return SETUP / ("_".join(page.relative_to(base).with_suffix("").parts) + ".py")


def run_page(page: Path, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's program in `folder`, in an interpreter of its own."""
    source = folder.parent / f"{folder.name}-page.py"
    source.write_text(program(text), encoding="utf-8")
    setup = setup_of(page)
    if named(page) in CHECKED:
        setup = folder.parent / f"{folder.name}-setup.py"
        setup.write_text(f"from tests.docs_output import checked_print\nprint = checked_print({named(page)!r})\n")
    main = folder.parent / f"{folder.name}-main.py"
    main.write_text(
        "namespace = {'__name__': '__main__'}\n"
        + "".join(
            f"exec(compile(open({str(path)!r}, encoding='utf-8').read(), {shown!r}, 'exec'), namespace)\n"
            for path, shown in ((setup, setup.name), (source, named(page)))
            if path.exists()
        ),
        encoding="utf-8",
    )
    # The repository is on the path for the setups alone; a page imports what is installed, or on PYTHONPATH.
    paths = [str(ROOT)] if setup.exists() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(paths)}
    frameworks = re.search(IMPORTS_TORCH, program(text)) is not None
    # Some setups say how datasets is to begin, and so it must not have.
    data = not frameworks and not (setup.exists() and "os.environ" in setup.read_text(encoding="utf-8"))
    return run_program(main, folder=folder, environment=environment, frameworks=frameworks, data=data)


WITH_PYTHON = [page for page in PAGES if program(page.read_text(encoding="utf-8")).strip()]
GUIDES = ROOT / "docs" / "guides"


# These need nothing that a test has not, and their processes would import PyTorch for a second each.
IN_PLACE = {page for page in WITH_PYTHON if not page.is_relative_to(GUIDES)} - {ROOT / "README.md"}


def lane(page: Path) -> Any:
    """Guides, which take seconds together, and what needs other people's trainers, have lanes of their own."""
    if page == GUIDES / "in-your-trainer.md":
        return pytest.mark.trainers
    return pytest.mark.slow if page.is_relative_to(GUIDES) else ()


@pytest.mark.parametrize("page", [pytest.param(page, marks=lane(page), id=named(page)) for page in WITH_PYTHON])
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    if page in IN_PLACE:
        text = program(page.read_text(encoding="utf-8"))
        assert not re.search(r"^ *(?:import|from) (?:tests|scripts|examples)\b", text, flags=re.MULTILINE)
        monkeypatch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AlignmentWarning)
            exec(compile(text, named(page), "exec"), {"__name__": "page"})
        return
    done = run_page(page, page.read_text(encoding="utf-8"), folder)
    assert done.returncode == 0, f"{named(page)}:\n{done.stdout}\n{done.stderr}"
    if page != GUIDES / "inspect.md":  # whose example is wrong on purpose
        assert "AlignmentWarning" not in done.stderr, f"{named(page)}:\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebooks_hold_what_they_print(path: Path) -> None:
    """Written by `python -m scripts.notebooks --write`."""
    assert outputs_of(execute(path).cells) == outputs_of(cells_of(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebooks_state_their_job_and_hold_what_any_machine_prints(path: Path) -> None:
    first, *others = cells_of(path)
    assert first["cell_type"] == "markdown"
    assert re.match(r"# .*\n\n\*\*Job:\*\* ", "".join(first["source"]))
    assert [cell["execution_count"] for cell in others if cell["cell_type"] == "code"] == [
        number + 1 for number in range(len(code_of(path)))
    ]
    for text in chain.from_iterable(outputs_of(others)):
        assert not re.search(r"0x[0-9a-f]{6}|(?<![\w.])/\w+/|\d\.?\d* ?(?:ms|seconds|it/s)", text), text
    assert len("".join(chain.from_iterable(outputs_of(others)))) < 2000


@cache
def blocks_of_pages() -> list[tuple[Path, Block]]:
    return [(page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]


def test_blocks_say_what_they_are() -> None:
    for page, block in blocks_of_pages():
        where = f"{named(page)}:{block.line}"
        assert block.language in LANGUAGES, (
            f"{where}: expected one of {sorted(LANGUAGES)} after the fence, found {block.info!r}"
        )
        for word in shlex.split(block.info)[1:]:
            assert re.fullmatch(r"(title|hl_lines|linenums)=.*", word), (
                f"{where}: {word!r} after the fence; no block is left out of the tests, and output is `text`"
            )


MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = {".ci", "adapters", "docs", "examples", "mouse_core", "scripts", "tests"}


def command_problems(code: str) -> list[str]:
    """What a block of shell commands names that this repository does not have."""
    problems = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            problems += [f"make {target}: no such target" for target in targets if target not in MAKE_TARGETS]
        for word in words:
            path = word.removeprefix("./")
            inside = "/" in path and path.split("/")[0] in FOLDERS
            if (inside or re.fullmatch(r"[\w-]+\.(py|md|toml|txt)", path)) and not (ROOT / path).exists():
                problems.append(f"{word}: no such file")
            if match := re.fullmatch(r"(?:mouse-data|\.)\[([\w,-]+)\]", word):
                extras = set(match[1].split(",")) - PROJECT["optional-dependencies"].keys()
                problems += [f"{word}: no such extra" for _ in extras]
    return problems


def test_commands_name_what_exists() -> None:
    for page, block in blocks_of_pages():
        if block.language == "bash":
            assert not command_problems(block.code), f"{named(page)}:{block.line}"


def headings(text: str) -> set[str]:
    """The anchors that a page's headings give on the web."""
    prose = re.sub(r"^([ \t]*)(`{3,}|~{3,}).*?^\1\2[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.*?) *#*$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# Pages in docs/ are checked where they are built, with the anchors that MkDocs makes.
@pytest.mark.parametrize("page", TOP, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"(?:href|src)=\"([^\"]+)\"", text):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / parts.path) if parts.path else page
        assert file.exists(), f"{named(page)}: {target}: no such file"
        if parts.fragment and file.suffix == ".md":
            assert parts.fragment in headings(file.read_text(encoding="utf-8")), (
                f"{named(page)}: {target}: no such heading"
            )


def test_setups_belong_to_pages() -> None:
    expected = {setup_of(page) for page in PAGES}
    assert set(SETUP.glob("*.py")) <= expected


def shown() -> list[str]:
    """The modules that the reference shows."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    return re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)


PUBLIC = {name: path for name, path in ALL.items() if not any(part.startswith("_") for part in name.split("."))}


def named_in_all(module: str) -> set[str] | None:
    """What a module's ``__all__`` names; None where it has none."""
    for node in parse(ALL[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def test_the_reference_is_complete() -> None:
    directives = shown()
    assert len(directives) == len(set(directives)), "a module stands in the reference twice"
    files = [module for module, path in PUBLIC.items() if path.name != "__init__.py"]
    missing = {module for module in files if not any(f"{module}.".startswith(f"{one}.") for one in directives)}
    assert not missing, f"docs/reference/ lacks {sorted(missing)}"


def test_every_format_is_in_the_reference() -> None:
    directives = set(shown()) - {"mouse_core.formats"}
    gives = re.compile(r"^def read_\w+\((?:(?!\ndef ).)*?\) -> RowStream:", flags=re.MULTILINE | re.DOTALL)
    readers = [module for module, path in PUBLIC.items() if gives.search(path.read_text(encoding="utf-8"))]
    assert len(readers) > 10
    missing = [module for module in readers if not any(f"{module}.".startswith(f"{one}.") for one in directives)]
    assert not missing, f"docs/reference/ lacks {missing}"


def test_all_that_a_package_takes_in_is_in_its_all() -> None:
    for module, path in PUBLIC.items():
        if path.name != "__init__.py" or (names := named_in_all(module)) is None:
            continue
        taken = {
            alias.asname or alias.name
            for node in parse(path).body
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mouse_")
            for alias in node.names
        }
        assert taken <= names, f"{module}: __all__ lacks {sorted(taken - names)}"


def test_docstrings_speak_of_what_is_public() -> None:
    public: set[str] = set()
    for module in set(shown()) & ALL.keys():
        public |= named_in_all(module) or {getattr(node, "name", "") for node in parse(ALL[module]).body}
    classes = {
        node.name: module
        for module, path in PUBLIC.items()
        for node in parse(path).body
        if isinstance(node, ast.ClassDef)
    }
    for module, path in PUBLIC.items():
        for node in parse(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name not in public:
                continue
            documented = [part for part in statements(node) if isinstance(part, ast.ClassDef | ast.FunctionDef)]
            text = "\n".join(ast.get_docstring(part) or "" for part in documented if not part.name.startswith("_"))
            for name in re.findall(r"``([A-Z]\w+)(?:[.(\[][^`]*)?``", text):
                assert name not in classes or name in public, (
                    f"{module}: {node.name}: {classes[name]}.{name} is in no __all__"
                )


ENTRY = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?: ")


def described(docstring: str) -> set[str]:
    """The parameters that the Args section of a docstring describes."""
    found: set[str] = set()
    lines = iter(inspect.cleandoc(docstring).splitlines())
    if "Args:" not in lines:  # consumes the lines up to the section
        return found
    depth: str | None = None
    for line in lines:
        if line and not line.startswith(" "):
            break
        if (match := ENTRY.match(line)) and (depth is None or match[1] == depth):
            depth = match[1]
            found |= {name.strip("*") for name in match[2].split(", ")}
    return found


def stale_parameters(tree: ast.Module) -> list[str]:
    """Parameters that docstrings describe and that are not there."""
    problems = []
    for node in statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        taken: set[str] = set()
        functions = [node]
        if isinstance(node, ast.ClassDef):
            functions = [item for item in node.body if getattr(item, "name", "") == "__init__"]
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            taken = {item.target.id for item in fields if isinstance(item.target, ast.Name)}
            if not functions and not fields:
                continue  # what it takes is said by its base class
        for function in functions:
            taken |= {item.arg for item in ast.walk(function.args) if isinstance(item, ast.arg)}
        stale = described(ast.get_docstring(node, clean=False) or "") - taken
        problems += [f"line {node.lineno}, {node.name}: {name}" for name in sorted(stale)]
    return problems


MODULES = [path for folder in ("mouse_core", "adapters") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_docstrings_describe_parameters_that_exist() -> None:
    found = {named(module): stale_parameters(parse(module)) for module in MODULES}
    assert not {module: stale for module, stale in found.items() if stale}


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = "Text.\n\n```python\nx = 1\n```\n\n=== Tab\n\n    ```python\n    assert x == 2, 'second'\n    ```\n"
    assert [block.line for block in blocks(page)] == [4, 10]
    done = run_page(ROOT / "docs" / "nowhere.md", page, tmp_path)
    assert done.returncode == 1
    assert 'File "docs/nowhere.md", line 10' in done.stderr
    assert "AssertionError: second" in done.stderr

    assert not command_problems("make test  # all of it\npip install 'mouse-data[torch]'\npip install -e '.[test]'")
    assert command_problems("make tset") == ["make tset: no such target"]
    assert command_problems("python examples/no.py") == ["examples/no.py: no such file"]
    assert command_problems("pip install 'mouse-data[tensorflow]'") == ["mouse-data[tensorflow]: no such extra"]
    assert headings("# The `one` idea\n```bash\n# not a heading\n```\n## Words, and more") == {
        "the-one-idea",
        "words-and-more",
    }

    text = (
        "Do.\n\n    Args:\n        a, b: Two: of\n            them: 2.\n        *c: X.\n\n    Returns:\n        d: Y."
    )
    assert described(text) == {"a", "b", "c"}
    assert stale_parameters(ast.parse(f'def f(a, *c):\n    """{text}"""')) == ["line 1, f: b"]
    assert not stale_parameters(
        ast.parse(f'class F:\n    """{text}"""\n    a: int\n    def __init__(self, b, *c): ...')
    )
