"""What the operator records: its JSON lines, its text, its Python dicts and the analyser say the same."""

from __future__ import annotations

import numpy as np
import pytest

from amx_sft_moe import SftMoe, timeline
from amx_sft_moe.timeline import cli

pytest.importorskip("pandas")

_ROUNDING_NS = 501  # text and JSON have three decimals of a millisecond


def make_operator():
    rng = np.random.default_rng(0)

    def tensor(*shape):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)

    op = SftMoe(num_experts=4, top_k=2, hidden_size=32, intermediate_size=48)
    op.set_base(tensor(4, 48, 32), tensor(4, 48, 32), tensor(4, 32, 48))
    op.set_lora(down_lora_a=tensor(4, 4, 48), down_lora_b=tensor(4, 32, 4))
    ids = rng.integers(0, 4, (20, 2))
    op.forward_sft(tensor(20, 32), ids, np.abs(tensor(20, 2)))
    op.backward(tensor(20, 32))
    return op


@pytest.fixture
def operator():
    return make_operator()


def walls(read: timeline.Timeline) -> dict[str, float]:
    table = read.phases.groupby("phase", observed=True)["wall_ns"].sum()
    return {str(name): ns for name, ns in table.items()}


def test_all_forms_agree(operator, tmp_path):
    dicts = [operator.last_forward_times(), operator.last_backward_times()]
    expected = {
        name: ms * 1e6 for one in dicts for name, ms in one["phases"].items() if not name.endswith("_total")
    }
    (tmp_path / "json").write_text(operator.dump_times("json"))
    (tmp_path / "text").write_text(operator.dump_times("text"))
    from_json, from_text = timeline.read(tmp_path / "json"), timeline.read(tmp_path / "text")
    from_dicts = timeline.from_times(dicts)
    assert walls(from_dicts) == pytest.approx(expected, rel=1e-9)
    assert walls(from_json) == pytest.approx(expected, abs=_ROUNDING_NS)
    assert walls(from_text) == pytest.approx(expected, abs=_ROUNDING_NS)
    for read in (from_json, from_text, from_dicts):
        assert [str(step) for step in read.passes["step"]] == ["forward", "backward"]
    totals = [one["total_ms"] * 1e6 for one in dicts]
    assert from_json.passes["total_ns"].tolist() == pytest.approx(totals, abs=_ROUNDING_NS)


def test_the_command_reads_it(operator, tmp_path, capsys):
    (tmp_path / "json").write_text(operator.dump_times("json"))
    assert cli.main([str(tmp_path / "json")]) == 0
    out = capsys.readouterr().out
    assert "D3_gemm" in out
    assert "forward" in out


@pytest.mark.parametrize("form", ["json", "text", "trace"])
def test_the_end_marks_are_known(form, tmp_path, monkeypatch):
    """Those that the recorder writes; with the second limit not even the first pass fits."""
    for limit, steps in ((12_000, 12), (300, 1)):
        path = tmp_path / f"{limit}"
        monkeypatch.setenv("AMX_SFT_MOE_TRACE_LIMIT", str(limit / 1e6))
        if form == "trace":
            monkeypatch.setenv("AMX_SFT_MOE_TRACE", str(path))
        else:
            monkeypatch.setenv("AMX_SFT_MOE_TIMER", form)
            monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(path))
        for _ in range(steps):
            make_operator()
        assert path.stat().st_size == limit
        if steps > 1:
            notes = timeline.read(path).notes
            assert any("the recording reached its limit" in note for note in notes)
            assert not any("could not be used" in note or "broken" in note for note in notes)
        else:
            with pytest.raises(timeline.TimelineError, match="the recording reached its limit"):
                timeline.read(path)
