"""Tables of a page: numbers with their errors and intervals, rounded to them."""

import math

import pandas as pd

from curvescope.report.page_elements import GOOD
from curvescope.report.pieces.tables import table
from curvescope.report.run_reader import link
from curvescope.viz.scenes import in_interval
from synthetic_runs import Page, made, make_run


def test_numbers_that_stand_alone_have_the_digits_that_mean_something():
    frame = pd.DataFrame({
        "step": [0.0, 200.0], "residual": [0.0044831, 3e-8], "gap": [2378.28937, 0.5],
        "low": [2378.28937, 0.5], "high": [2378.294, 0.7], "verdict": ["larger", "holds"], "loss": [2.0, 2.5],
    })  # fmt: skip
    found = table("t", frame, anchor="t")
    assert [[cell.text for cell in row] for row in found.rows] == [
        ["0", "0.0045", "2,378.29", "larger", "2.000"],
        ["200", "3e-08", "0.50 (0.50 to 0.70)", "holds", "2.500"],
    ]
    assert [row[3].level for row in found.rows] == [None, GOOD]


def test_numbers_stand_with_their_errors():
    frame = pd.DataFrame({
        "block": ["E"], "trace": [21812.3], "trace_stderr": [1034.5], "tr H": ["< 3.2"], "± H": [1.0],
        "lambda_max": [2.5], "error": [float("nan")], "loss": [0.523456], "low": [0.48], "high": [0.57],
        "steps": [12345], "ratio": [0.123456], "W_Q": [True],
    })  # fmt: skip
    found = table("t", frame, anchor="t")
    shown = dict(zip(found.header, found.rows[0], strict=True))
    texts = {name: cell.text for name, cell in shown.items()}
    assert texts == {
        "block": "E", "trace": "21,800 ± 1,000", "tr H": "< 3.2", "λ_max": "2.5",
        "loss (low to high)": "0.523 (0.480 to 0.570)", "steps": "12,345", "ratio": "0.1235", "W_Q": "yes",
    }  # fmt: skip
    assert shown["trace"].sort == "21812.3"
    assert shown["ratio"].sort == "0.123456"
    assert shown["tr H"].sort == "0"
    assert found.numbers == [False, True, True, True, True, True, True, False]


def test_the_interval_of_a_number_is_not_that_of_its_error():
    frame = pd.DataFrame({
        "frobenius": [6.6721], "stderr": [1.4123], "low": [3.7812], "high": [18.812],
        "trace": [3041.2], "trace_stderr": [818.1], "trace_low": [434.71], "trace_high": [5648.2],
    })  # fmt: skip
    found = table("t", frame, anchor="t")
    texts = dict(zip(found.header, (cell.text for cell in found.rows[0]), strict=True))
    assert texts == {
        "frobenius": "6.7 ± 1.4", "low": "3.8", "high": "18.8",
        "trace": "3,040 ± 820", "trace low": "430", "trace high": "5,650",
    }  # fmt: skip


def test_numerical_and_sampling_errors_have_columns_of_their_own():
    frame = pd.DataFrame({
        "lambda_max": [2215.0], "lambda_max_numerical": [1.5], "lambda_max_sampling": [171.2],
        "lambda_max_low": [1911.0], "lambda_max_high": [2602.0], "trace": [21812.3],
        "trace_numerical": [1034.5],
    })  # fmt: skip
    found = table("t", frame, anchor="t")
    texts = dict(zip(found.header, (cell.text for cell in found.rows[0]), strict=True))
    assert "2,220 (1,910 to 2,600)" in texts.values() or "2,215 (1,911 to 2,602)" in texts.values()
    assert "21,800 ± 1,000" in texts.values()
    assert "170" in texts.values()


def test_a_wide_interval_does_not_round_its_number_away():
    frame = pd.DataFrame({
        "value": [-1997.3, 0.0], "value low": [-1.5e6, -3.0], "value high": [6712.0, 4.0], "n": [0.5, 0.5],
    })  # fmt: skip
    texts = [row[0].text for row in table("t", frame, anchor="t").rows]
    assert texts == ["-2,000 (-1,500,000 to 6,700)", "0.0 (-3.0 to 4.0)"]


def test_an_interval_without_an_end_says_so():
    frame = pd.DataFrame({
        "ratio": [0.93771, 0.5, 2.1, 0.4], "ratio low": [0.1052, -math.inf, -math.inf, 0.38],
        "ratio high": [math.inf, 0.75, math.inf, 0.42],
    })  # fmt: skip
    found = table("t", frame, anchor="t")
    assert [row[0].text for row in found.rows] == [
        "0.94 (0.11 to ∞)", "0.50 (-∞ to 0.75)", "2.1 (-∞ to ∞)", "0.400 (0.380 to 0.420)",
    ]  # fmt: skip


def test_an_estimate_from_one_probe_has_two_digits_and_no_error():
    frame = pd.DataFrame({"block": ["a", "b"], "‖H‖": [11.01, 13.402], "± H": [math.nan, 0.32]})
    found = table("t", frame, "Norms.", anchor="t")
    assert [row[1].text for row in found.rows] == ["11 ± ?", "13.40 ± 0.32"]
    assert found.caption == "Norms. ± ?: an estimate from one probe, without an error."
    assert in_interval(11.01, math.nan, math.nan) == "11 (one probe, no error)"
    assert in_interval(13.402, 12.9, 18.11) == "13, 95 % interval 12 to 19"
    assert in_interval(0.5, 0.5, 0.5) == "0.5000"


def test_a_large_number_is_no_count_for_being_whole():
    frame = pd.DataFrame({"λ": [4.1234567890123e17, 2.0], "steps": [100.0, 2e6]})
    found = table("t", frame, anchor="t")
    assert [[cell.text for cell in row] for row in found.rows] == [
        ["4.123e+17", "100"],
        ["2.000", "2,000,000"],
    ]


def test_an_error_that_belongs_to_nothing_is_a_column_of_its_own():
    frame = pd.DataFrame({"case": ["a"], "error": [0.1], "change": [1.0], "share_error": [0.5]})
    assert table("t", frame, anchor="t").header == ["case", "error", "change", "share error"]


def test_a_long_table_is_cut_and_says_so():
    found = table("t", pd.DataFrame({"x": range(9000)}), "Words.", anchor="t")
    assert len(found.rows) == 8000
    assert found.caption == "Words. The first 8,000 of 9,000 rows; the CSV file has all."


def test_a_table_links_to_its_csv_where_that_is_there(tmp_path):
    run = make_run(tmp_path)
    links = [has["href"] for has, _ in Page(made(tmp_path, run)).all("a", class_="csv")]
    assert links == ["runs/spectrum/20260102-030405-0123abcd/tables/values.csv"]
    assert (tmp_path / links[0]).is_file()
    (run / "tables" / "values.csv").unlink()
    assert not Page(made(tmp_path, run)).all("a", class_="csv")
    (tmp_path / "a b#.csv").write_text("x", encoding="utf-8")
    assert link(tmp_path / "a b#.csv", tmp_path / "p.html") == "a%20b%23.csv"
