"""DeviceEngine without a GPU: what it refuses and keeps, and one step through all kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.contract import BF16_FULL, CLAMP_ONLY, FP32_PLAIN, REF_FP8_ROUND
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_asked import bf16_contract
from dsv4nb.engine.gpus import placed, require_gpus
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, Engine
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.testing.dumped import drawn_like, dumped_values
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.twin_kernels import twin_kernels

# one flipped rounding in a network of random numbers moves everything behind it: measured 0.044; keys of a wrong place
# or an angle of a wrong position move it by its own size
TWIN_GAP = CACHED_GAP = 0.1

SMALL: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_topk": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "o_lora_rank": 64,
    "q_lora_rank": 256,
    "sliding_window": 32,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One layer of each kind, as small as the kernels' tiles are."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("small"), **SMALL)
    return open_checkpoint(folder, require_tokenizer=False)


@pytest.fixture(scope="module")
def engine(small: Checkpoint) -> DeviceEngine:
    return DeviceEngine.from_checkpoint(small, device="cpu", max_seq=192)


WIDTH, TAIL = 128, 64  # head_dim and qk_rope_head_dim


def arrays_at(engine: DeviceEngine, pos: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return what a sequence of `pos` positions might have left: normal values."""
    rng = np.random.default_rng(seed)
    state = engine.new_state()
    state.pos = pos
    arrays = engine.dump(engine.capture(state))
    engine.release(state)
    return {name: drawn_like(rows, rng, width=WIDTH, tail=TAIL) for name, rows in arrays.items()}


def as_float32(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return dumped_values(rows, width=WIDTH, tail=TAIL)


def test_is_an_engine(engine: DeviceEngine, small: Checkpoint) -> None:
    seam: Engine = engine
    assert (seam.vocab_size, seam.max_seq, seam.block_size) == (small.config.vocab_size, 192, 0)
    assert seam.new_state().pos == 0


def test_contracts_keep_their_roundings_and_hand_over_bfloat16() -> None:
    assert bf16_contract(REF_FP8_ROUND) == BF16_FULL == bf16_contract(BF16_FULL)
    clamp = bf16_contract(CLAMP_ONLY)
    assert (clamp.name, clamp.kv_fp8, clamp.activations) == ("clamp_only_bf16", False, "bfloat16")
    with pytest.raises(EngineError, match="'fp32_plain' does not round"):
        bf16_contract(FP32_PLAIN)


def test_refuses_by_name_what_cannot_run(engine: DeviceEngine, small: Checkpoint) -> None:
    state = engine.new_state()
    other = DeviceEngine(engine.ranks, small.config, small.contract, max_seq=192)
    for call, told in (
        (lambda: engine.prefill(state, []), "no tokens"),
        (lambda: engine.prefill(state, [1] * 193), "max_seq 192"),
        (lambda: engine.forward_rows(state, [1] * (MAX_ROWS + 1)), "at most 8"),
        (lambda: engine.forward_rows(state, [3, -1]), "-1 is outside the vocabulary of 64"),
        (lambda: engine.commit(state, 1), "left 0 rows"),
        (lambda: engine.forward_rows(other.new_state(), [1]), "new_state"),
        (lambda: engine.restore(other.capture(other.new_state())), "capture"),
        (lambda: engine.draft(state, 1, lambda row, slot, before: 0), "has no drafter"),
        (lambda: engine.load({}, 193), "max_seq 192"),
    ):
        with pytest.raises(EngineError, match=told):
            call()
    with pytest.raises(Cancelled):
        engine.prefill(state, [1, 2], should_stop=lambda: True)
    assert state.pos == 0
    other.close()
    with pytest.raises(EngineError, match="closed"):
        other.new_state()
    engine.release(state)
    with pytest.raises(EngineError, match="released"):
        engine.forward_rows(state, [1])


def test_without_a_gpu_one_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"devices is 0; torch .* here; devices='cpu' runs everywhere"):
        require_gpus((0,))
    with pytest.raises(RequestError, match=r"devices is 0,1; torch .* here; devices='cpu' runs everywhere"):
        require_gpus((0, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert require_gpus((1,)) == (1,)
    with pytest.raises(RequestError, match=r"devices is 2; this machine has 2 CUDA devices"):
        require_gpus((2,))
    with pytest.raises(RequestError, match=r"devices is 0,2; this machine has 2 CUDA devices"):
        require_gpus((0, 2))


def test_two_gpus_are_taken_where_they_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 0))
    assert require_gpus((1, 0)) == (1, 0) == require_gpus((1, 0), "tensor")
    assert placed((1, 0), None) == placed((0, 2), "tensor") == placed((2,), None) == placed((), None) == ("tensor", "")
    assert require_gpus((0, 2)) == (0, 2)
    assert placed((0, 2), None) == ("pipeline", "GPU 2 does not reach the memory of GPU 0")
    told = r"placement is 'tensor' on devices 0,2; GPU 2 does not reach .* placement='pipeline' needs no such reach"
    with pytest.raises(RequestError, match=told) as refused:
        require_gpus((0, 2), "tensor")
    assert refused.value.param == "placement"
    assert require_gpus((2, 1, 0), "pipeline") == (2, 1, 0)
    assert placed((2, 1, 0), "pipeline") == ("pipeline", "")
    for placement in (None, "tensor"):
        with pytest.raises(RequestError, match=r"devices is 2,1,0; two GPUs share .*\(2, 1\), .* placement='pipeline'"):
            require_gpus((2, 1, 0), placement)


@pytest.mark.parametrize(
    ("devices", "placement", "told"),
    [
        ((0, 1), "tensors", "placement is 'tensors'; it must be 'tensor' or 'pipeline'"),
        (0, "tensor", "placement is 'tensor' on 1 GPU; it is how several GPUs share a model"),
        (0, "pipeline", "placement is 'pipeline' on 1 GPU"),
        ("cpu", "tensor", "placement is 'tensor' on the CPU"),
    ],
)
def test_placements_that_there_are_not_are_refused(devices: Any, placement: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        dsv4nb.load("toy", devices=devices, placement=placement)
    assert refused.value.param == "placement"


@pytest.mark.parametrize("pos", [0, 1, 31, 33, 130, 192])
def test_snapshots_hold_what_was_captured(engine: DeviceEngine, pos: int) -> None:
    arrays = arrays_at(engine, pos)
    snapshot = engine.load(arrays, pos)
    state = engine.restore(snapshot)
    digest = state.digest()
    dumped = engine.dump(engine.capture(state))
    assert dumped.keys() == arrays.keys()
    assert all(np.array_equal(dumped[name], rows) for name, rows in arrays.items())
    assert snapshot.nbytes == sum(rows.nbytes for rows in arrays.values())

    again = engine.restore(snapshot)
    with torch.inference_mode():
        for layer in state.caches.layers:
            for buffer in layer.buffers():
                buffer.zero_()
    assert again.digest() == digest
    assert (state.digest() == digest) == (pos == 0)
    for held in (state, again):
        engine.release(held)
    snapshot.release()
    with pytest.raises(EngineError, match="was released"):
        engine.restore(snapshot)


def test_loading_refuses_arrays_that_mean_something_else(engine: DeviceEngine, small: Checkpoint) -> None:
    arrays = arrays_at(engine, 40)
    broken = [
        ({**arrays, "0.window": arrays["0.window"][1:]}, r"0.window at position 40 is uint8 \[32, 208\]"),
        ({**arrays, "0.window": as_float32(arrays["0.window"])}, r"found float32 \[32, 128\]"),
        ({**arrays, "1.compressor.source": arrays["0.window"]}, r"1.compressor.source .* is float32"),
        ({name: rows for name, rows in arrays.items() if name != "1.indexer.entries"}, "without 1.indexer.entries"),
        ({**arrays, "9.window": arrays["0.window"]}, "with 9.window"),
    ]
    for wrong, told in broken:
        with pytest.raises(EngineError, match=told):
            engine.load(wrong, 40)
    cpu = CpuEngine.from_checkpoint(small, max_seq=192)
    assert engine.layout() != cpu.layout()
    assert engine.layout().startswith("cache 1, bfloat16 as uint16, float32 source, e4m3 records of 208 bytes, tail 64")


def test_rows_that_no_contract_rounds_stay_bfloat16(engine: DeviceEngine) -> None:
    clamp = DeviceEngine(engine.ranks, engine.config, CLAMP_ONLY, max_seq=192)
    arrays, plain = arrays_at(engine, 130), arrays_at(clamp, 130)
    assert {name for name, rows in arrays.items() if rows.dtype != plain[name].dtype} == {
        *(f"{layer}.window" for layer in range(3)),
        *(f"{layer}.compressor.entries" for layer in (1, 2)),
    }
    assert "records" not in clamp.layout() and clamp.layout() != engine.layout()
    for rows, other in ((plain, engine), (arrays, clamp)):
        with pytest.raises(EngineError, match=r"0\.window at position 130 is uint"):
            other.load(rows, 130)
    state, before = clamp.restore(clamp.load(plain, 130)), clamp.layout()
    with twin_kernels():
        assert np.isfinite(clamp.forward_rows(state, TOKENS)).all() and before == clamp.layout()
    assert state.caches.nbytes == sum(clamp.state_bytes(192).values()) > sum(engine.state_bytes(192).values())


def test_memory_is_counted_and_comes_back(engine: DeviceEngine) -> None:
    snapshot = engine.load(arrays_at(engine, 130), 130)
    assert engine.blocks_in_use == 3  # entries of ratio 4, their keys, and the entry of ratio 128
    before = engine.cache_bytes()[0]
    state = engine.restore(snapshot)
    assert engine.blocks_in_use == 6
    filled = sum(engine.state_bytes(130).values())
    assert engine.cache_bytes()[0].used - before.used == filled
    engine.release(state)
    snapshot.release()
    assert engine.blocks_in_use == 0
    assert engine.cache_bytes()[0].used == 0
    assert engine.new_state().caches.nbytes == sum(engine.state_bytes(engine.max_seq).values())


POS, TOKENS = 126, [9, 40]  # the second row ends windows of either ratio and reads their entries


def test_a_step_is_that_of_the_cpu_engine(engine: DeviceEngine, small: Checkpoint) -> None:
    arrays = arrays_at(engine, POS)
    cpu = CpuEngine.from_checkpoint(small, max_seq=192)
    theirs = cpu.restore(cpu.load({name: as_float32(rows) for name, rows in arrays.items()}, POS))
    ours = engine.restore(engine.load(arrays, POS))
    wanted = cpu.forward_rows(theirs, TOKENS)
    with twin_kernels():
        found = engine.forward_rows(ours, TOKENS)
    # what bfloat16 between the roundings moves in a network of random numbers
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    cpu.commit(theirs, 2)
    engine.commit(ours, 2)
    cached = engine.dump(engine.capture(ours))
    for name, rows in cpu.dump(cpu.capture(theirs)).items():
        assert np.allclose(as_float32(cached[name]), rows, atol=0.15 * np.abs(rows).max(initial=0.0), rtol=0.0), name


@pytest.mark.kernels
@pytest.mark.usefixtures("indexed_by_scalars")
def test_a_step_through_all_kernels_is_that_of_their_twins(engine: DeviceEngine) -> None:
    snapshot = engine.load(arrays_at(engine, POS), POS)
    ours, theirs, alone = (engine.restore(snapshot) for _ in range(3))
    found = engine.forward_rows(ours, TOKENS)
    with twin_kernels():
        wanted = engine.forward_rows(theirs, TOKENS)
    gap, size = np.abs(found - wanted).max(), np.abs(wanted).max()
    print(f"gap {gap:.5f} of {size:.4f}")
    assert gap < TWIN_GAP * size
    for state in (ours, theirs):
        engine.commit(state, 2)
    twins = engine.dump(engine.capture(theirs))
    for name, rows in engine.dump(engine.capture(ours)).items():
        ours_as, theirs_as = as_float32(rows), as_float32(twins[name])
        assert np.allclose(ours_as, theirs_as, atol=CACHED_GAP * np.abs(theirs_as).max(initial=0.0), rtol=0.0), name
    assert np.array_equal(engine.forward_rows(alone, TOKENS[:1])[0], found[0])
