"""The paper's tables, cell by cell: the command that fills it, and the paper's number.

Numbers are bACC / GM in percent; in table 6 bACC / GM / accuracy, in table 8 the time of an
iteration relative to FixMatch. "N/A" and "-" stand where the paper has no number; a letter refers
to a note below the table. The last rows of table 1 are methods after the paper (docs/after.md).
Tables on digits have the same rows, those on traffic signs nearly so; "attractor" is the study of
docs/attractor.md, "front" the one in README.md, "soft" compares hard with soft labels.
"""
import re
from dataclasses import dataclass, replace

SCALES = ("mini", "paper")
LONG = {"gamma 100": "--gamma_l 100 --gamma_u 100", "gamma 150": "--gamma_l 150 --gamma_u 150",
        "gamma_u 1": "--gamma_l 100 --gamma_u 1",
        "gamma_u 100 reversed": "--gamma_l 100 --gamma_u 100 --reverse_u"}
DIGITS = {"gamma 5": "--gamma_l 5 --gamma_u 5", "gamma 10": "--gamma_l 10 --gamma_u 10",
          "gamma_u 1": "--gamma_l 5 --gamma_u 1",
          "gamma_u 5 reversed": "--gamma_l 5 --gamma_u 5 --reverse_u"}
NAMES = {"gtsrb": "signs"}                               # of datasets, where it is not the flag's
SIGNS = {"natural tail": "", "gamma_u 1": "--n1 25 --gamma_l 12.5 --m1 150 --gamma_u 1"}
VARIANTS = {"prior start": " --attractor_start prior", "vector": " --attractor vector",
            "soft": " --labels soft", "hard": " --labels hard",
            "bfloat16": " --dtype bfloat16"}                         # what the name of a row says


@dataclass(frozen=True)
class Cell:
    table: str
    row: str
    column: str
    base: str
    method: str
    dataset: str
    flags: str
    paper: str
    test: str = ""                                       # kind of an imbalanced test set

    @property
    def title(self):
        """Of its column, where a table has several datasets."""
        return f"{NAMES.get(self.dataset, self.dataset)}, {self.column}"

    def runs_at(self, scale):
        """Whether something is trained for it. Digits and signs are ours, in miniature only, and
        the cost table is measured by scripts/bench.py."""
        return (self.paper not in ("N/A", "-") and self.dataset != "bench"
                and (scale == "mini" or self.dataset not in ("digits", "gtsrb")))

    def command(self, scale, seed):
        core = self.method in ("l2ac", "none") and self.base != "supervised"
        script = f"train_{self.base}.py" if core else f"-m baselines.train --base {self.base}"
        words = (f"python {script} --method {self.method} --dataset {self.dataset}", self.flags,
                 f"--scale {scale} --seed {seed}")
        return " ".join(filter(None, words))


def own_flags(base, method, row, flags):
    """The flags of a setting as a row takes them: supervised methods have no gamma_u, unless four
    counts make a split together, and DARP has to estimate a distribution that is not that of the
    labels."""
    if base == "supervised" and method != "upper_bound" and "--m1" not in flags:
        return re.sub(r" --gamma_u \S+| --reverse_u", "", flags)
    gammas = re.findall(r"--gamma_[lu] (\S+)", flags)   # none: all classes are divided alike
    alike = not gammas or (len(gammas) == 2 and len({*gammas}) == 1 and "--reverse_u" not in flags)
    estimates = method in ("darp", "darp_crt") and not alike
    variants = "".join(flag for name, flag in VARIANTS.items() if name in row)
    return (flags + variants + " --darp_estimate" * estimates).strip()


def read_cells(number, dataset, columns, text, setting=None):
    """Cells from lines `base method label | paper's number | ...`, one number for each column, or
    none at all where the paper has no such row.

    columns: {title: flags}, or {title: kind of test set} if `setting` holds the flags of all.
    """
    cells = []
    for line in text.strip().splitlines():
        head, *numbers = (part.strip() for part in line.split("|"))
        base, method, label = head.split(maxsplit=2)
        numbers = numbers or [""] * len(columns)
        for (column, value), paper in zip(columns.items(), numbers, strict=True):
            cells.append(Cell(number, label, column, base, method, dataset,
                              own_flags(base, method, label, setting or value),
                              paper, value if setting else ""))
    return cells


TABLES = {
    "1": read_cells("1", "cifar10", LONG, """
        supervised vanilla    Labels only    | 58.8/51.0     | 55.6/44.0 | 58.8/51.0 | 58.8/51.0
        supervised resampling w/ Re-sampling | 55.8/45.1     | 52.2/38.2 | 55.8/45.1 | 55.8/45.1
        supervised ldam       w/ LDAM-DRW    | 62.8/58.9     | 57.9/50.4 | 62.8/58.9 | 62.8/58.9
        supervised crt        w/ cRT         | 63.2/59.9     | 59.3/54.6 | 63.2/59.9 | 63.2/59.9
        mixmatch   none       MixMatch       | 64.8/49.0     | 62.5/42.5 | 41.5/12.0 | 47.9/20.5
        mixmatch   darp       w/ DARP        | 67.9/61.2     | 65.8/56.5 | 86.7/86.2 | 72.9/71.0
        mixmatch   sar        w/ SaR         | 66.8/59.9     | 64.4/57.3 | 68.4/62.0 | 65.5/64.2
        mixmatch   daso       w/ DASO        | 69.8/69.3     | 66.5/65.4 | 75.5/74.6 | 65.7/62.0
        mixmatch   abc        w/ ABC         | 75.7/74.7     | 68.5/56.4 | 72.1/41.2 | 62.9/59.9
        mixmatch   la         w/ LA, labeled rows
        mixmatch   la_all     w/ LA, all rows
        mixmatch   l2ac       **w/ L2AC**    | 76.6/75.7     | 72.1/70.3 | 87.2/86.7 | 74.0/72.9
        mixmatch   l2ac       w/ L2AC, prior start (ours)
        fixmatch   none       FixMatch       | 71.5/66.8 (a) | 68.4/59.9 | 68.9/42.8 | 65.5/26.0
        fixmatch   darp       w/ DARP        | 75.5/73.0     | 70.4/64.9 | 85.4/85.0 | 74.9/72.3
        fixmatch   crest+     w/ CReST+      | 77.5/76.1     | 72.1/68.9 | N/A       | N/A
        fixmatch   sar        w/ SaR         | 77.6/75.9     | 71.5/66.9 | 85.9/85.3 | 78.3/76.1
        fixmatch   daso       w/ DASO        | 78.3/76.5     | 74.6/71.7 | 87.9/87.7 | 79.5/78.9
        fixmatch   abc        w/ ABC         | 80.2/78.9     | 74.7/72.2 | 81.3/80.2 | 70.3/67.9
        fixmatch   la         w/ LA, labeled rows
        fixmatch   la_all     w/ LA, all rows
        fixmatch   la_post_hoc w/ LA, post hoc
        fixmatch   l2ac       **w/ L2AC**    | 82.1/81.5     | 77.6/75.8 | 89.5/89.2 | 82.2/81.7
        fixmatch   l2ac       w/ L2AC, prior start (ours)
        fixmatch   darp_crt   w/ DARP + cRT  | 82.4/81.8 (d) | 79.6/78.9 (d) | 87.0/86.8 (d) |
        fixmatch   cdmad      w/ CDMAD       | 83.6/83.1 (d) | 80.8/79.9 (d) | 87.5/87.1 (d) |
        fixmatch   adello     w/ ADELLO
        fixmatch   acr        w/ ACR
        """),
    "2": read_cells("2", "cifar100", {"gamma 10": "--gamma_l 10 --gamma_u 10",
                                      "gamma 20": "--gamma_l 20 --gamma_u 20"}, """
        fixmatch none FixMatch    | 55.1/46.7 | 49.5/34.2
        fixmatch darp w/ DARP     | 56.3/48.2 | 50.2/36.0
        fixmatch abc  w/ ABC      | 58.2/51.8 | 53.1/42.2
        fixmatch daso w/ DASO     | 58.3/51.4 | 53.0/39.5
        fixmatch l2ac **w/ L2AC** | 57.8/52.1 | 52.6/43.0
        """) + read_cells("2", "stl10", {"gamma_l 10": "--gamma_l 10",
                                         "gamma_l 20": "--gamma_l 20"}, """
        fixmatch none FixMatch    | 69.6/62.6 (b) | 65.5/26.0 (b)
        fixmatch darp w/ DARP     | 72.9/69.5 (b) | 74.9/72.3 (b)
        fixmatch abc  w/ ABC      | 78.2/77.3     | 72.7/70.6
        fixmatch daso w/ DASO     | 78.2/77.4     | 75.4/74.4
        fixmatch l2ac **w/ L2AC** | 79.9/79.1     | 77.0/75.8
        """),
    "3": read_cells("3", "sun397", {"SUN397": ""}, """
        supervised vanilla Labels only | 38.3/29.9
        supervised crt     cRT         | 39.3/33.7
        fixmatch   none    FixMatch    | 44.9/35.7
        fixmatch   darp    w/ DARP     | 45.5/37.5
        fixmatch   abc     w/ ABC      | 47.0/39.2
        fixmatch   l2ac    **w/ L2AC** | 48.8/40.6
        """),
    "4": read_cells("4", "cifar10", {
        f"beta {b} %": f"{LONG['gamma 100']} --beta {b / 100}"
        for b in (1, 5, 10, 20, 30)}, """
        fixmatch none FixMatch    | 54.9/16.5 | 65.1/35.5 | 69.0/53.9 | 72.0/62.2 | 76.5/74.3
        fixmatch l2ac **w/ L2AC** | 62.8/55.8 | 75.9/74.1 | 79.3/78.4 | 80.8/79.9 | 83.6/83.2
        """) + read_cells("4", "stl10", {
        f"beta {b} %": f"--gamma_l 10 --beta {b / 100}" for b in (5, 10, 20, 40, 60)}, """
        fixmatch none FixMatch    | 46.5/19.9 | 48.8/27.0 | 58.2/39.8 | 67.2/60.7 | 69.2/67.6
        fixmatch l2ac **w/ L2AC** | 62.8/57.1 | 66.5/62.9 | 72.6/70.6 | 77.0/75.7 | 78.8/77.9
        """),
    "5": read_cells("5", "cifar10", {k: LONG[k] for k in ("gamma 100", "gamma_u 100 reversed")}, """
        fixmatch none         FixMatch                   | 71.5/68.8 (a) | 65.5/26.0
        fixmatch attractor    FixMatch w/ bias attractor | 73.9/70.7     | 66.6/44.8
        fixmatch single_level single-level ablation      | 78.4/76.6     | 79.3/78.0
        fixmatch l2ac         **L2AC**                   | 82.1/81.5     | 82.2/81.7
        """),
    "6": read_cells("6", "cifar10", {
        "Test-1 (long-tailed)": "longtail", "Test-2 (reversed)": "reversed",
        "Test-3 (random)": "random"}, """
        fixmatch none   FixMatch    | 72.4/66.3/86.1     | 72.7/66.9/56.6     | 72.3/65.7/75.6
        fixmatch darp   w/ DARP     | 74.8/72.5/86.3     | 75.5/73.2/63.9     | 75.6/73.3/77.4
        fixmatch crest+ w/ CReST+   | 77.8/76.5/86.3 (c) | 77.2/74.8/68.9 (c) | 77.5/76.3/80.3 (c)
        fixmatch abc    w/ ABC      | 80.2/79.2/88.1     | 80.2/79.0/71.7     | 80.1/79.0/82.8
        fixmatch l2ac   **w/ L2AC** | 82.6/82.0/87.2     | 82.4/81.8/78.6     | 82.7/82.1/83.9
        """, LONG["gamma 100"]),
    "7": read_cells("7", "cifar10", {f"step, {column}": f"--imbalance step {LONG[column]}"
                                     for column in ("gamma 100", "gamma_u 1")}, """
        fixmatch none FixMatch    | 55.0/24.4 | 60.1/18.32
        fixmatch darp w/ DARP     | 58.6/30.0 | -
        fixmatch abc  w/ ABC      | 75.1/67.5 | 75.8/69.2
        fixmatch l2ac **w/ L2AC** | 76.7/74.5 | 81.8/80.5
        """),
    "8": read_cells("8", "bench", {"CIFAR-10 (K = 10)": "10", "CIFAR-100 (K = 100)": "100"}, """
        fixmatch none        FixMatch             | 1.00 (19.6 it/s) | 1.00 (19.6 it/s)
        fixmatch darp        w/ DARP              | 1.08 (18.2 it/s) | 2.61 (7.5 it/s)
        fixmatch abc         w/ ABC               | 1.30 (15.1 it/s) | 1.32 (14.9 it/s)
        fixmatch full_unroll w/ L2AC, traditional | 1.98 (9.9 it/s)  | 2.02 (9.7 it/s)
        fixmatch l2ac        **w/ L2AC**          | 1.38 (14.2 it/s) | 1.41 (13.9 it/s)
        """),
}


def elsewhere(table, name, dataset, columns):
    """The cells of one of the paper's tables on CIFAR-10 with the settings of another dataset.
    columns: {the paper's: (ours, its flags)}"""
    return [replace(cell, table=name, column=columns[cell.column][0], dataset=dataset,
                    flags=own_flags(cell.base, cell.method, cell.row, columns[cell.column][1]),
                    paper="N/A" if cell.paper == "N/A" else "")
            for cell in TABLES[table] if cell.column in columns]


STUDY = """
    supervised vanilla     Labels only
    fixmatch   none        FixMatch
    fixmatch   la          w/ LA, labeled rows
    fixmatch   la_all      w/ LA, all rows
    fixmatch   l2ac        w/ L2AC, vector
    fixmatch   l2ac        **w/ L2AC**
    fixmatch   l2ac        w/ L2AC, prior start (ours)
    supervised upper_bound All labels
    """
ON_DIGITS = dict(zip(LONG, DIGITS.items(), strict=True))
OURS = """
    fixmatch   single_level w/ single-level ablation
    supervised upper_bound  All labels
    """
TABLES["1-digits"] = elsewhere("1", "1-digits", "digits", ON_DIGITS) + read_cells(
    "1-digits", "digits", DIGITS, OURS)
TABLES["5-digits"] = elsewhere("5", "5-digits", "digits", ON_DIGITS)
TABLES["attractor"] = read_cells("attractor", "digits", DIGITS, STUDY) + read_cells(
    "attractor", "cifar10", {k: LONG[k] for k in ("gamma_u 1", "gamma_u 100 reversed")}, STUDY)
FRONT = """
    supervised vanilla Labels only
    fixmatch   none    FixMatch
    fixmatch   la      w/ LA, labeled rows
    fixmatch   l2ac    **w/ L2AC**
    fixmatch   l2ac    w/ L2AC, soft labels (ours)
    """
TABLES["front"] = read_cells("front", "digits", DIGITS, FRONT) + read_cells(
    "front", "gtsrb", SIGNS, FRONT)
ON_SIGNS = dict(zip(("gamma 100", "gamma_u 1"), SIGNS.items(), strict=True))
TABLES["signs"] = [cell for cell in elsewhere("1", "signs", "gtsrb", ON_SIGNS)
                   if cell.base != "mixmatch" or cell.row in ("MixMatch", "**w/ L2AC**")]
TABLES["signs"] += read_cells("signs", "gtsrb", SIGNS, OURS)
SOFT = "".join(f"fixmatch {row}{labels}\n" for row in (
    "none FixMatch", "la w/ LA, labeled rows", "la_all w/ LA, all rows",
    "single_level w/ single-level ablation", "l2ac **w/ L2AC**", "l2ac w/ L2AC, prior start (ours)")
    for labels in ("", ", soft")) + "fixmatch cdmad w/ CDMAD, hard\nfixmatch cdmad w/ CDMAD"
TABLES["soft"] = [cell for dataset, columns in (
    ("digits", DIGITS), ("gtsrb", SIGNS), ("cifar10", {"gamma_u 1": LONG["gamma_u 1"]}))
    for cell in read_cells("soft", dataset, columns, SOFT)]
TABLES["bfloat16"] = read_cells("bfloat16", "digits", {"gamma_u 1": DIGITS["gamma_u 1"]}, """
    fixmatch none FixMatch, bfloat16
    fixmatch l2ac L2AC, bfloat16
    """)
