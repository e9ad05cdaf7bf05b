from dataclasses import replace

from experiments import PLAN, outcome_of, results_of

from daskps import _speedup_table


def table_of(plan):
    lines = _speedup_table.text(results_of(plan)).splitlines()
    return lines[: lines.index("")], lines[lines.index("") + 1 :]


class TestText:
    def test_has_a_row_for_each_trial(self):
        (head, base, *rows), _ = table_of(PLAN)
        assert head.split()[:5] == ["mode", "workers", "x", "threads", "speedup"]
        assert " ".join(base.split()) == (
            "plain skorch 1x1 1.00 1.00 to 1.00 1.00 - - - - 0.5000 0.7500 - 400 - -"
        )
        assert " ".join(rows[-2].split()) == (
            "batch 2x1 1.77 1.77 to 1.77 0.88 1.77 +0% 22.00 0.80 0.5000 0.7500 3.2 400 60 500"
        )

    def test_columns_stand_under_their_heads(self):
        lines, _ = table_of(PLAN)
        assert len({len(line) for line in lines}) == 1

    def test_says_where_and_how_it_was_measured(self):
        _, notes = table_of(PLAN)
        text = "\n".join(notes)
        assert "fashion-mnist, 3072 training rows, batch_size=32, 1 epoch(s), 3 turn(s)" in text
        assert "Machine: processor " in text
        assert "Model, batch, 1 thread(s): c0 + c1*b/K + S(K)" in text
        assert "this one too" in text

    def test_marks_what_the_model_has_not_seen(self):
        lines, notes = table_of(
            replace(PLAN, fit_to=(1, 2), grid=(*PLAN.grid, PLAN.grid[0]._replace(workers=4)))
        )
        assert [line.split()[1] for line in lines if "*" in line] == ["4x1", "4x1"]
        assert "fitted to 1, 2 workers; * marks other numbers" in "\n".join(notes)

    def test_says_so_if_rounds_were_measured_apart(self):
        _, notes = table_of(replace(PLAN, fit_to=(1,)))
        text = "\n".join(notes)
        assert "from 1 worker, in batch mode with half the batch too, and a stand-in's fits" in text
        assert "With K > 1, c0 and c1 are 1.25 times as large;" in text

    def test_emulation_stands_before_everything(self):
        base = replace(PLAN.base, emulate=(0.002, 0.0005625))
        text = _speedup_table.text(results_of(replace(PLAN, base=base), outcome_of))
        assert text.startswith(
            "EMULATED: nothing was computed. Each step waited 2 ms + 0.5625 ms for each row"
        )

    def test_says_where_cores_were_too_few_to_emulate(self):
        def crowded(trial):
            outcome = outcome_of(trial)
            if trial.workers == 2:
                outcome.report["ranks"] = [
                    {**entry, "compute_seconds": 2 * entry["compute_seconds"]}
                    for entry in outcome.report["ranks"]
                ]
            return outcome

        base = replace(PLAN.base, emulate=(0.002, 0.0005625))
        plan = replace(PLAN, base=base, modes=("batch",))
        notes = _speedup_table.notes(results_of(plan, crowded))
        (note,) = [note for note in notes if note.startswith("Too few cores")]
        assert note.startswith(
            "Too few cores for batch, 2x1, emulated: steps took 22 ms in place of 11 ms."
        )
        assert not any("Too few" in note for note in _speedup_table.notes(results_of(plan)))


def test_markdown_has_the_command_and_the_same_cells():
    lines = _speedup_table.markdown(results_of(PLAN), "daskps speedup").splitlines()
    assert lines[0] == "    daskps speedup"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 7
    assert {line.count("|") for line in table} == {16}
    assert table[-1].split(" | ")[1:3] == ["2x1", "2.07"]
