# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM's own rejection sampler with our acceptance, under Triton's interpreter."""

from __future__ import annotations

import importlib
import inspect
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to interpret the kernels", allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is not installed")

import interpreted_vllm  # noqa: F401 - before vLLM's own modules
from seer.engine.vllm.gpu_drafts import install
from seer.engine.vllm.gpu_drafts.sampler import VERIFYING, couple
from seer.engine.vllm.gpu_drafts.speculator import GroupedSpeculator
from vllm_engines import needs_vllm
from vllm_names import read

pytestmark = needs_vllm

VOCABULARY, K = 40, 3
POSITIONS = [[7, 8, 9, 10], [3], [20, 21, 22, 23]]
"""Of the logits of three requests: two verify three drafts each."""
ROWS = [5, 0, 2]
"""Their places in vLLM's request states."""
TEMPERATURES = [0.5, 1.0, 0.8, 1.0, 1.0, 0.0]
OF_REQUEST = [row for row, positions in zip(ROWS, POSITIONS, strict=True) for _ in positions]


def flat(values: list[list[int]]) -> Any:
    return torch.tensor([one for some in values for one in some])


class Verifying:
    """vLLM's sampler over fixed logits, with what it reads of the runner."""

    def __init__(self, *, num_logprobs: int = -1) -> None:
        module: Any = importlib.import_module(VERIFYING)
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(len(OF_REQUEST), VOCABULARY, generator=generator) * 3
        self.temperature = torch.tensor(TEMPERATURES)
        self.seeds = torch.arange(len(TEMPERATURES)) + 11
        states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=self.temperature),
            seeds=SimpleNamespace(gpu=self.seeds),
            max_num_logprobs=lambda _: num_logprobs,
        )
        sampler = SimpleNamespace(
            compute_nans=False,
            use_fp64_gumbel=False,
            return_sampling_mask=False,
            logprobs_mode="processed_logprobs",
            sampling_states=states,
            req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.ones(len(ROWS) * 2, dtype=torch.int32))),
            apply_sampling_params=lambda logits, *_: self.processed(logits),
        )
        config: Any = SimpleNamespace(
            num_speculative_tokens=K,
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            fly_entropy_threshold=0.3,
            fly_entropy_top_k=3,
        )
        self.sampler = module.RejectionSampler(sampler, config, torch.device("cpu"))

    def processed(self, logits: Any) -> Any:
        divisors = torch.where(self.temperature > 0, self.temperature, torch.ones(()))[torch.tensor(OF_REQUEST)]
        return logits / divisors[:, None]

    def plain(self) -> list[list[int]]:
        """What vLLM samples in each place without drafts."""
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        kwargs: dict[str, Any] = (
            {"is_drafting": False} if "is_drafting" in inspect.signature(gumbel_sample).parameters else {}
        )
        sampled = gumbel_sample(
            self.processed(self.logits),
            torch.tensor(OF_REQUEST, dtype=torch.int32),
            self.temperature,
            self.seeds,
            flat(POSITIONS),
            apply_temperature=False,
            **kwargs,
        ).tolist()
        ends = np.cumsum([len(positions) for positions in POSITIONS])
        return [sampled[end - len(positions) : end] for end, positions in zip(ends, POSITIONS, strict=True)]

    def __call__(self, drafts: list[list[int]], *rest: Any, draft_logits: Any = None) -> Any:
        counts = [len(positions) for positions in POSITIONS]
        cu = np.cumsum([0, *counts]).astype(np.int32)
        batch = SimpleNamespace(
            num_reqs=len(ROWS),
            input_ids=flat([[0, *some] for some in drafts]).to(torch.int32),
            positions=flat(POSITIONS),
            logits_indices=torch.arange(len(OF_REQUEST)),
            idx_mapping=torch.tensor(ROWS, dtype=torch.int32),
            idx_mapping_np=np.array(ROWS),
            expanded_idx_mapping=torch.tensor(OF_REQUEST, dtype=torch.int32),
            expanded_local_pos=torch.tensor([at for count in counts for at in range(count)], dtype=torch.int32),
            cu_num_logits=torch.from_numpy(cu),
            cu_num_logits_np=cu,
            seq_lens=torch.tensor([some[-1] + 1 for some in POSITIONS], dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([some[-1] + 1 for some in POSITIONS], dtype=torch.int32),
        )
        return self.sampler(self.logits, batch, draft_logits, *rest)


@pytest.fixture(autouse=True)
def coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(VERIFYING)
    monkeypatch.setattr(module, "rejection_sample", module.rejection_sample)  # put back afterwards
    couple()


def other_than(token: int) -> int:
    return (token + 1) % VOCABULARY


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_draft_is_accepted_while_plain_vllm_would_have_sampled_it(num_right: int) -> None:
    verifying = Verifying()
    plain = verifying.plain()
    right, wrong = plain[0][:K], plain[2][:K]
    wrong[num_right:] = [other_than(token) for token in wrong[num_right:]]
    found = verifying([right, [], wrong])
    assert found.num_sampled.tolist() == [4, 1, num_right + 1]
    assert found.num_rejected.tolist() == [0, 0, K - num_right]
    for tokens, count, expected in zip(found.sampled_token_ids.tolist(), found.num_sampled, plain, strict=True):
        assert tokens[:count] == expected[:count]


def test_every_accepted_token_has_its_log_probability() -> None:
    verifying = Verifying(num_logprobs=0)
    plain = verifying.plain()
    found = verifying([plain[0][:K], [], [plain[2][0], other_than(plain[2][1]), 0]])
    expected = torch.log_softmax(verifying.processed(verifying.logits), dim=-1)
    at, logprobs = 0, found.logprobs_tensors
    for tokens, count, positions in zip(found.sampled_token_ids.tolist(), found.num_sampled, POSITIONS, strict=True):
        for i in range(int(count)):
            assert logprobs.logprob_token_ids[at + i, 0] == tokens[i]
            assert abs(float(logprobs.logprobs[at + i, 0] - expected[at + i, tokens[i]])) < 1e-5
        at += len(positions)


def test_drafts_that_carry_probabilities_are_verified_by_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(VERIFYING)
    given: list[Any] = []

    def vllms_own(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given.append((args, kwargs))
        return torch.zeros(len(ROWS), K + 1, dtype=torch.int64), torch.ones(len(ROWS), dtype=torch.int32)

    monkeypatch.setattr(module, "rejection_sample", vllms_own)
    couple()
    verifying = Verifying()
    verifying([[1, 2, 3], [], [4, 5, 6]])
    assert not given
    draft_logits = torch.zeros(len(TEMPERATURES), K, VOCABULARY)
    verifying([[1, 2, 3], [], [4, 5, 6]], draft_logits=draft_logits)
    ((args, _),) = given
    assert args[1] is draft_logits


def test_coupling_a_second_time_changes_nothing() -> None:
    module: Any = importlib.import_module(VERIFYING)
    before = module.rejection_sample
    couple()
    assert module.rejection_sample is before
    assert install._unknown_arguments(*install.CALLED[0]) is None  # what the next engine of this process asks


@pytest.mark.parametrize("release", read())
def test_the_speculator_takes_what_every_release_gives_it(release: str) -> None:
    methods = read()[release]["vllm.v1.worker.gpu.spec_decode.speculator"]["BaseSpeculator"]
    assert methods.keys() >= {"propose", "capture", "init_cudagraph_manager"}
    for method, arguments in methods.items():
        inspect.signature(getattr(GroupedSpeculator, method)).bind(*arguments)
