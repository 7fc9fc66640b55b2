"""Heads tied to embeddings: tiles beside their table, what is loaded into either, and CUDA graphs."""

import copy
import threading

import pytest
import torch

import kbit
from graph_tape import enable_on_cpu
from kbit.nn import KbitLinear, quantize_model, tied
from kbit.ops import forms
from test_nn import Toy
from tiny_models import build

IDS = torch.arange(3)


def toy_of(factor=1.0, tie=True, head_first=False):
    """Quantized, its weights times a factor, by which blocks' scales have one, too."""
    toy = Toy(tie).eval()
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.mul_(factor)
    if head_first:
        toy._modules = {name: toy._modules[name] for name in reversed(toy._modules)}
    return quantize_model(toy, kbit.QuantizationPolicy(embedding_bits=4, search=False))


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def tied_model(tiles_pay):
    model = Toy().eval()
    return quantize_model(model, kbit.QuantizationPolicy(embedding_bits=4, search=False))


def test_a_tied_head_has_tiles_beside_the_table(tied_model, monkeypatch):
    forms.set_rule(lambda op, device: False)
    plain = tied_model(IDS)
    forms.set_rule(lambda op, device: True)
    made = []
    own = KbitLinear._to_tiles
    monkeypatch.setattr(KbitLinear, "_to_tiles", lambda *given: made.append(given[0]) or own(*given))
    for _ in range(3):
        close(tied_model(IDS), plain)
    assert made.count(tied_model.lm_head) == 1
    assert tied_model.lm_head.weight_packed is tied_model.embed_tokens.weight_packed
    assert not any("tiled" in name for name in tied_model.lm_head.state_dict())
    copied = copy.deepcopy(tied_model)
    close(copied(IDS), plain)
    assert made.count(copied.lm_head) == 1


def test_tiles_of_a_tied_head_follow_its_codes_in_place(tied_model):
    other = quantize_model(Toy().eval(), kbit.QuantizationPolicy(embedding_bits=4, search=False))
    tied_model(IDS)
    tiles = tied.tiles_beside(tied_model.lm_head)
    tied_model.load_state_dict(other.state_dict())
    assert tied.tiles_beside(tied_model.lm_head) is tiles
    assert torch.equal(tiles, tied.tiles_beside(other.lm_head))
    close(tied_model(IDS), other(IDS))
    table = tied_model.embed_tokens
    with torch.no_grad():
        table.weight_packed[0] = table.weight_packed[1]
        table.weight_absmax[0] = table.weight_absmax[1]
    logits = tied_model(IDS)
    assert torch.equal(logits[:, 0], logits[:, 1])


@pytest.mark.parametrize(("was", "comes"), [(1, 1), (1, 1e-6), (1e-6, 1), (1e-6, 1e-6)])
@pytest.mark.parametrize("tie", [False, True])
def test_loaded_tensors_stay_where_a_cuda_graph_has_recorded_them(tiles_pay, tie, was, comes):
    """Also of tied layers that have factors of their own, as moves give them. New factors move."""

    def addresses():
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        return {name: tensor.data_ptr() for name, tensor in tensors if was == comes or "scale" not in name}

    model, other = toy_of(was, tie)._apply(torch.clone), toy_of(comes, tie)
    before, kept = addresses(), [*model.parameters(), *model.buffers()]  # no address is given away again
    model.load_state_dict(other.state_dict())
    del kept
    close(model(IDS), other(IDS))
    assert addresses() == before


@pytest.mark.gpu
def test_a_tied_head_on_a_gpu():
    model = quantize_model(Toy().eval(), kbit.QuantizationPolicy(embedding_bits=4, search=False)).cuda()
    ids = torch.arange(3, device="cuda")
    stale = tied.tiles_beside(model.lm_head).clone()
    with torch.no_grad():
        model.half()(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(ids)
        other = quantize_model(Toy().eval(), kbit.QuantizationPolicy(embedding_bits=4, search=False))
        model.load_state_dict(other.state_dict())
        assert not torch.equal(stale, tied.tiles_beside(model.lm_head))
        dirt = [torch.full((512,), torch.nan, device="cuda") for _ in range(5000)]  # over all that was freed
        del dirt
        graph.replay()
        assert torch.equal(logits, model(ids))
        want = other(ids.cpu())
        torch.testing.assert_close(logits.cpu().float(), want, rtol=0.02, atol=0.02)


def test_tied_heads_without_tiles(tied_model, monkeypatch):
    """Of other scales than tiles have, while torch.compile traces, on a CPU, for an accelerate hook."""
    want = tied_model(IDS)
    head = tied_model.lm_head
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert tied.tiles_beside(head) is None
    monkeypatch.undo()
    forms.set_rule(lambda op, device: False)
    assert tied.tiles_beside(head) is None
    forms.set_rule(lambda op, device: True)
    policy = kbit.QuantizationPolicy(embedding_bits=4, absmax_format="float16")
    other = quantize_model(Toy().eval(), policy)
    other(IDS)
    assert tied.tiles_beside(other.lm_head) is None
    compiled = torch.compile(tied_model, fullgraph=True, backend="eager")
    close(compiled(IDS), want)


def tables_of(model):
    """What the embedding and the head take for their one table."""
    head = model.lm_head(torch.eye(40)).T
    return model.embed_tokens(torch.arange(60)), head


@pytest.mark.parametrize(("was", "comes"), [(1, 1e-6), (1e-6, 1), (1, 1)])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_what_is_loaded_into_one_of_tied_layers_is_of_both(tiles_pay, was, comes, head_first, part):
    model, other = (toy_of(factor, head_first=head_first) for factor in (was, comes))
    for made in (model, copy.deepcopy(model)):
        made._apply(torch.clone)
        tiles = tied.tiles_beside(made.lm_head)
        made.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict())
        want = other.embed_tokens(torch.arange(60))
        for have in tables_of(made):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=0)
        assert tied.tiles_beside(made.lm_head) is tiles


def test_what_is_loaded_in_inference_mode_is_seen(tiles_pay):
    with torch.inference_mode():
        model = toy_of()._apply(torch.clone)
        model(IDS)
        for other in (toy_of(), toy_of()):
            model.load_state_dict(other.state_dict())
            close(model(IDS), other(IDS))


def test_a_load_that_assigns_writes_into_no_tensor_of_others():
    first, second = toy_of(1e-6), toy_of()
    states = [{name: part.clone() for name, part in model.state_dict().items()} for model in (first, second)]
    kept = copy.deepcopy(states)
    model = toy_of()
    for state, want in (*zip(states, (first, second), strict=True), (states[0], first)):
        model.load_state_dict(state, assign=True)
        close(model(IDS), want(IDS))
    for state, before in zip(states, kept, strict=True):
        assert all(torch.equal(part, before[name]) for name, part in state.items())


def test_tiles_of_what_moves_away_go(tied_model):
    tied_model(IDS)
    assert tied_model.lm_head in tied._beside
    tied_model.to("meta")
    assert tied_model.lm_head not in tied._beside


def test_two_threads_make_the_tiles_once(tied_model, monkeypatch):
    own, both = KbitLinear._to_tiles, threading.Barrier(2)
    made, found = [], []
    monkeypatch.setattr(KbitLinear, "_to_tiles", lambda *given: made.append(1) or own(*given))

    def call():
        both.wait()
        found.append(tied.tiles_beside(tied_model.lm_head))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    assert len(made) == 1


def test_codes_written_past_the_count_of_changes_are_seen_when_asked(tied_model):
    other = toy_of()
    tiles = tied.tiles_beside(tied_model.lm_head)
    for part in ("weight_packed", "weight_absmax"):
        getattr(tied_model.lm_head, part).data.copy_(getattr(other.lm_head, part))
    tied.renew_tiles(tied_model, written=True)
    assert tied.tiles_beside(tied_model.lm_head) is tiles
    assert torch.equal(tiles, tied.tiles_beside(other.lm_head))


def test_recorded_steps_go_on_with_what_the_table_loads(tiles_pay):
    models = [build("llama", torch.float32, spread=False) for _ in range(2)]
    for model in models:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model, other = (
        kbit.quantize_model(each, kbit.QuantizationPolicy(embedding_bits=4, search=False)) for each in models
    )
    assert model.lm_head.is_tied

    def generated(**more):
        return model.generate(
            IDS[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **more
        )

    recorder = enable_on_cpu(model)
    for _ in range(2):
        generated(cache_implementation="static")
    model.model.embed_tokens.load_state_dict(other.model.embed_tokens.state_dict())
    replayed = recorder.replayed
    tokens = generated(cache_implementation="static")
    assert recorder.replayed > replayed
    assert torch.equal(tokens, generated())
