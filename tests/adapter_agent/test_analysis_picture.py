from dataclasses import replace

import pytest
from rich.console import Console

from adapter_agent import terminal
from adapter_agent.analysis_picture import picture_of_analysis
from analyzers.backends import load_backend
from analyzers.schema import Residual
from tests.adapter_agent import samples

RESIDUAL = Residual(kind="attention_residual", carried_bytes_per_token=768, cut_multiple=4)
ANALYSIS = replace(samples.analysis(), residual=RESIDUAL)


def picture(width, analysis=ANALYSIS, backend=None, **more):
    console = Console(width=width, highlight=False, **more)
    with console.capture() as captured:
        console.print(picture_of_analysis(analysis, backend))
    return captured.get()


@pytest.mark.parametrize("width", [60, 80, 110, 240])
def test_the_picture_fits_and_has_every_section(width):
    text = picture(width, backend=load_backend("cpu"))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= min(width, 110)
    for title in ("Layers", "Structure", "Parts", "Operators", "Fusable", "On CPU", "Unusual"):
        assert any(line.startswith(title) for line in lines), title


def test_every_layer_is_a_letter_and_cuts_are_bars():
    lines = [line.strip() for line in picture(80).splitlines()]
    assert "kKKM|KKKM" in lines
    legend = "K kda x 6   M mla x 2   small: dense feed-forward   |: a pipeline may cut"
    assert legend in lines
    free = picture(80, replace(ANALYSIS, residual=None))
    assert "kKKMKKKM" in free
    assert "a pipeline may cut" not in free


def test_bars_are_as_long_as_their_share():
    rows = {
        line.split()[0]: line.count("█")
        for line in picture(110).splitlines()
        if line.strip().startswith(("routed experts", "mixer", "embedding"))
    }
    assert rows["routed"] > 3 * rows["mixer"] > 0
    assert rows["embedding"] == 0


def test_what_a_backend_lacks_is_said_with_who_says_so():
    text = " ".join(picture(110, backend=load_backend("ascend-910c")).split())
    assert "missing kda: no entry analyzers/backends/ascend-910c.yaml: native.kda" in text
    assert "native rms_norm, linear" in text
    assert "not asked mul.Tensor, add.Tensor" in text
    assert "missing" not in picture(110)


def test_an_analysis_without_weights_graph_or_experts_is_drawn():
    bare = replace(
        ANALYSIS,
        checkpoint=None,
        experts=None,
        notes=[],
        blocks=[replace(ANALYSIS.blocks[0], graph=None)],
    )
    text = picture(80, bare)
    assert "none in the folder: planning only" in text
    assert "Fusable" not in text
    assert "Unusual" not in text


def test_markup_in_a_model_is_shown_as_it_is():
    text = picture(80, replace(ANALYSIS, architecture="[red]Evil[/red]", notes=["[bold]x"]))
    assert "[red]Evil[/red]" in text
    assert "[bold]x" in text


def test_a_pipe_gets_plain_lines_without_trailing_space(capsys):
    terminal.show(picture_of_analysis(ANALYSIS))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_a_terminal_gets_colours():
    text = picture(80, force_terminal=True, color_system="standard")
    assert "\x1b[36m" in text
