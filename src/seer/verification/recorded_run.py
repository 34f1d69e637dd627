# SPDX-License-Identifier: Apache-2.0
"""A finished run in its folder, read back for verification: what was asked for, what came, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seer.config import RolloutConfig, RunConfig, build_run
from seer.engine.local.model_config import read_config
from seer.engine.local.tokenizer import decoder
from seer.engine.prepare import PreparedEngine, prepare
from seer.errors import InputError
from seer.metrics.events import Ended, Queued
from seer.metrics.run_events import read_run_events
from seer.runs.identity import run_identity, turns_identity
from seer.runs.journal_lines import PastRequest, read_header, read_journal
from seer.runs.prompts import EncodedPrompt, encode_for, read_prompts, refuse
from seer.runs.results import read_responses
from seer.runs.run import group_of
from seer.runs.run_folder import RunFolder
from seer.types import Response
from seer.verification.noise import Scoring, scoring_of
from seer.verification.results_check import Asked, ResultsCheck, check_results
from seer.verification.verify import PlainModel, ResponseToVerify, Verification, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run's folder, read."""

    folder: RunFolder
    config: RunConfig
    prompts: Sequence[EncodedPrompt]
    asked: Asked
    model_dir: Path
    weights: Path
    """To score with; the run's own are in `model_dir`."""
    scoring: Scoring
    """How the engine sampled."""


def read_recorded(folder: RunFolder, weights: Path | None) -> RecordedRun:
    """Read what a run was asked for; `weights` are to be scored with instead of its own."""
    manifest = folder.read_facts()
    if manifest.config is None or manifest.command != "rollout":
        raise InputError(f"{folder.manifest} holds no configuration", hint="verify a folder of `seer rollout`")
    config = build_run(manifest.config, source=str(folder.manifest))
    if config.rollout.engine == "fake":
        raise InputError(f"{folder.path} was run on the fake engine", hint="it has no model to verify against")
    if manifest.model_dir is None:
        raise InputError(f"{folder.path} ended before its instances had started", hint="there is nothing to verify")
    model_dir = Path(manifest.model_dir)
    engine = prepare(_lengths_of(config.rollout, model_dir))
    prompts = _read_prompts(folder, config, engine)
    model = read_config(model_dir)
    groups = [group_of(i, prompt, config.seed) for i, prompt in enumerate(prompts)]
    asked = Asked(
        groups=groups,
        codec=engine.codec,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        decode=decoder(model_dir) if any(group.sampling.stop for group in groups) else None,
        forced_lengths=_lengths_in_log(folder, manifest.options.instances) if manifest.forced_lengths else None,
        has_turns=config.environment is not None,
    )
    return RecordedRun(
        folder=folder,
        config=config,
        prompts=prompts,
        asked=asked,
        model_dir=model_dir,
        weights=weights or model_dir,
        scoring=scoring_of(config.rollout, model_dir),
    )


def check_recorded(run: RecordedRun) -> ResultsCheck:
    """Check all its responses against what was asked for, and its prompts and weights against its journal."""
    check = check_results(run.asked, read_responses(run.config.out or run.folder.results))
    if not run.folder.journal.exists():  # a comparison keeps none
        return check
    if run.asked.has_turns:
        _compare_with_journal(check, read_journal(run.folder.journal).past)
    header = read_header(run.folder.journal)
    turns = turns_identity(None, None) if run.asked.has_turns else None
    engine, dtype = run.config.rollout.engine, _identity_dtype(run)
    now = run_identity(
        run.prompts, engine=engine, dtype=dtype, weights=run.model_dir, seed=run.config.seed, turns=turns
    )
    if header.settings != now.settings:
        check.add("settings", "the prompts, their sampling or the seed are not those of the journal")
    if header.weights != now.weights and run.weights == run.model_dir:
        check.add("weights", f"{run.model_dir} has the hash {now.weights}, the journal {header.weights}")
    return check


def _compare_with_journal(check: ResultsCheck, past: Mapping[tuple[int, int], PastRequest]) -> None:
    """Drop responses that are not what the journal has: given tokens follow from no weights, nor does their end."""
    kept = []
    for response in check.sound:
        noted = past.get((response.group, response.index), PastRequest())
        tokens = [token for span in noted.spans for token in span.ids]
        mask = [int(not span.is_given) for span in noted.spans for _ in span.ids]
        if (response.token_ids, response.loss_mask) == (tokens, mask) and response.reward == noted.reward:
            kept.append(response)
        else:
            what = f"{len(response.token_ids)} tokens and reward {response.reward}"
            name = f"response {response.index} of prompt {response.prompt_id!r}"
            check.add("journal", f"{name}: {what}; the journal has {len(tokens)} tokens and reward {noted.reward}")
    check.sound = kept


def score(run: RecordedRun, responses: Sequence[Response]) -> Verification:
    """Score responses that passed the check again."""
    is_forced = run.asked.forced_lengths is not None
    to_verify = []
    for response in responses:
        prompt = run.prompts[response.group]
        to_verify.append(ResponseToVerify(prompt.token_ids, prompt.sampling, response, ends_ignored=is_forced))
    return verify(PlainModel(run.weights), to_verify, run.scoring)


def _identity_dtype(run: RecordedRun) -> str:
    """The type as the engine was prepared with: vLLM chooses it itself on a GPU."""
    rollout = run.config.rollout
    return rollout.dtype if rollout.engine == "vllm" and not rollout.on_cpu else run.scoring.dtype


def _lengths_of(rollout: RolloutConfig, model_dir: Path) -> RolloutConfig:
    """What decides which prompts fit; the device of the run may not be there."""
    return RolloutConfig(model=str(model_dir), max_model_len=rollout.max_model_len, kv=rollout.kv)


def _read_prompts(folder: RunFolder, config: RunConfig, engine: PreparedEngine) -> list[EncodedPrompt]:
    prompts, bad = read_prompts(folder.prompts)
    encoded, unfit = encode_for(prompts, config, engine)
    if not config.skip_bad:
        refuse([*bad, *unfit])
    return encoded[: config.limit]


def _lengths_in_log(folder: RunFolder, num_instances: int) -> dict[tuple[int, int], int]:
    """Tokens of each response by the event log."""
    events = read_run_events(folder.events, num_instances)
    keys = {event.request: (event.group, event.index) for event in events if isinstance(event, Queued)}
    return {keys[event.request]: event.num_generated for event in events if isinstance(event, Ended)}
