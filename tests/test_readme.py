"""The README's map from equations to lines is that of the code; its links lead somewhere.
`python tests/test_readme.py` writes the map anew."""
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("attractor.py", "bilevel.py", "train_fixmatch.py", "train_mixmatch.py")
MEANING = {
    1: "the lower loss: labeled rows and pseudo-labeled rows",
    2: "adaptive classifier: l^ = l + Delta f_omega(l)",
    3: "the lower problem: theta, phi minimise L(l^)",
    4: "one step of phi, as a function of omega",
    5: "the upper loss L_bal: the linear classifier alone on a balanced batch",
    6: "the step of omega, through the step of phi",
}
BLOCK = re.compile(r"(<!-- equations -->\n).*?(<!-- end -->)", re.S)


def tagged():
    """[(equation, file, line)] of every line that carries an equation's number, docstrings at the
    top of a file left out: those only announce."""
    found = []
    for file in FILES:
        lines = (ROOT / file).read_text().splitlines()
        body = next(i for i, line in enumerate(lines) if line.startswith(("import", "from")))
        for number, line in enumerate(lines[body:], body + 1):
            for numbers in re.findall(r"Eq\. (\d(?:, \d)*)", line):
                found += [(int(n), file, number) for n in numbers.split(", ")]
    return found


def equations():
    rows = ["| paper | what it says | lines |", "|---|---|---|"]
    for equation, meaning in MEANING.items():
        links = ", ".join(f"[`{file}:{line}`]({file}#L{line})" for n, file, line in tagged()
                          if n == equation)
        rows.append(f"| Eq. {equation} | {meaning} | {links} |")
    return "\n".join(rows)


def test_equation_map():
    assert {n for n, _, _ in tagged()} == set(MEANING)
    shown = BLOCK.search((ROOT / "README.md").read_text())
    assert shown and shown[0] == f"<!-- equations -->\n{equations()}\n<!-- end -->"


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@\w+@", (ROOT / "README.md").read_text())


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    headings = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", text, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        assert (ROOT / path).exists() if path else anchor in headings, target


if __name__ == "__main__":
    readme = ROOT / "README.md"
    table = equations()
    readme.write_text(BLOCK.sub(lambda old: f"{old[1]}{table}\n{old[2]}", readme.read_text()))
