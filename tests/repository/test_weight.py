"""tests/weight.py counts what Python 3.12's tokenize gives, on any version of Python."""

import pytest
import weight
from helpers.training_runs import ROOT

# Code, and the tokens that Python 3.12.1 and 3.13.0 found in it.
COUNTED = {
    "a = 'b' + 1.5  # comment": 5,
    'f"a{b}c"': 5,
    'f"{x!r:>{w}}"': 11,
    'f"{x:.3f}"': 5,
    'f"{x=}"': 4,
    'f"{{}}"': 2,
    'f"a{{b{c}"': 5,
    'f"{x:}"': 5,
    'f"}}a{x}{{"': 6,
    'f"a{{}}b{{}}c"': 5,
    'rf"\\d{x}"': 4,
    'f"{x:{y}}"': 8,
    'f"\\N{DASH}{x}"': 4,
    "f\"{f'{a}'}\"": 5,
    'f"""a\n{x}\nb"""': 5,
    "\"p\" f\"{', '.join(x[:2])} q\" 'r'": 15,
    'f"{a != b:,} {({1: 2}[1])}"': 20,
    'print(f"{n} updates", F"", f"plain")': 10,
}


@pytest.mark.parametrize(("code", "expected"), COUNTED.items())
def test_an_f_string_counts_as_in_python_3_12(code, expected):
    assert weight.weight(f"{code}\n") == expected
    if code[0] in "fr":  # as the one token that it is before Python 3.12
        assert weight._weight_of("STRING", code) == expected


@pytest.mark.full
def test_the_parts_of_the_project_add_up(capsys):
    weight.main(ROOT)
    *parts, total, settings, _, _, _, _ = capsys.readouterr().out.splitlines()
    counts = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in parts}
    code = [count for part, count in counts.items() if part.split("/")[0] in weight.CODE]
    assert int(total.split()[0].replace(",", "")) == sum(code) > 80_000
    assert settings.startswith("functions of utils")


NONE_OF = weight.LINES, weight.FUNCTIONS, weight.CONDITIONS


def test_no_place_must_be_read_twice():
    found = weight.excess(ROOT)
    assert [found[what] for what in NONE_OF] == [[], [], []]


def test_what_is_too_long_or_hides_a_condition_is_seen(tmp_path):
    long = "\n".join(["def f():", *["    pass"] * 50])
    (tmp_path / "train.py").write_text(f"{long}\nx = f'{{1 if x else 2}}'\n{'y' * 101}\n")
    found = weight.excess(tmp_path)
    assert [len(found[what]) for what in NONE_OF] == [1, 1, 1]
    (tmp_path / "train.py").write_text(long.replace("    pass", "", 1).replace("\n\n", "\n"))
    assert [len(found) for found in weight.excess(tmp_path).values()] == [0, 0, 0, 0]
