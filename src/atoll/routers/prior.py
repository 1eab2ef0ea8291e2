"""The router that ships with Atoll: it knows kinds of prompts, and models that others have measured.

Prompts belong to clusters (as in UniRoute's K-means router, arXiv 2502.08773, and Avengers, arXiv 2505.19797), and
every known model has a quality and an answer length in each. A model that is not known is guessed from price and size,
with the clusters' average difficulty as its shape. From there feedback moves it (`beliefs.py`). What ships in
`data/prior` are aggregates of public outcome tables under Apache-2.0 and MIT, made by `scripts/fit_prior.py`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, RouterError
from atoll.routers.artefact import candidates_from_json, candidates_to_json, read_about, read_artefact, write_artefact
from atoll.routers.base import Embeddings, Estimates, Router
from atoll.routers.beliefs import Beliefs, Prior
from atoll.routers.clusters import Clusters, find_clusters
from atoll.routers.guess import EFFORTS, SkillCurves
from atoll.routers.names import match_name
from atoll.routers.parameters import Range, check_parameters
from atoll.routers.pool import Pool, check_pool
from atoll.routers.skills import Skills, fit_skills, sigmoid
from atoll.routers.table import Matrix, OutcomeTable
from atoll.types import Candidate, Outcome

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHIPPED: Final = Path(__file__).parent / "data" / "prior"

KNOWN_STRENGTH: Final = 20.0
"""Outcomes that a measured level counts for: many were measured, but of other people's prompts."""
KNOWN_STD: Final = 0.05
GUESSED_STRENGTH: Final = 5.0
STATED_STD: Final = 0.1
"""Of a `quality_prior` in the configuration."""
DEFAULT_OUTPUT_TOKENS: Final = 300.0
_PROMPTS_PER_CLUSTER: Final = 15
_SKILL_LIMIT: Final = 8.0
_SKILL_FIELDS: Final = tuple(field.name for field in fields(Skills) if field.name != "mean_skill")
_FEEDBACK_FIELDS: Final = ("count", "surprise", "token_count", "token_ratio")


class PriorRouter(Router):
    """Parameters: at most `n_clusters` clusters are looked for (with `seed`), each of at least some prompts;
    `deviation_std` is how much a model's skill is expected to differ between clusters, in logits."""

    name: ClassVar[str] = "prior"
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "n_clusters": Range(1, 4096, is_integer=True),
        "deviation_std": Range(1e-3, 10.0),
        "seed": Range(0, 2**31 - 1, is_integer=True),
    }

    known_: tuple[Candidate, ...]
    """The models that were measured."""
    skills_: Skills
    curves_: SkillCurves

    def __init__(self, n_clusters: int = 128, *, deviation_std: float = 0.8, seed: int = 0) -> None:
        self.n_clusters = n_clusters
        self.deviation_std = deviation_std
        self.seed = seed
        self._lock = threading.Lock()

    @classmethod
    def shipped(cls, candidates: Sequence[Candidate], *, space: str, state: Path | None = None) -> Self:
        """The prior that ships, for this pool and for vectors of `space`.

        `state` is where an earlier run has saved a router that learned from feedback; it may not exist yet. Raises
        DataError when it cannot be read, RouterError when there is no prior for `space`.
        """
        router = cls.load(SHIPPED)
        router._set_first_space(space)
        if state is not None and state.exists():
            router._take_feedback(state)
        return router.set_candidates(candidates)

    def fit_table(
        self,
        table: OutcomeTable,
        candidates: Sequence[Candidate],
        *,
        space: str,
        dataset: Ints | None = None,
        other_spaces: Mapping[str, Matrix] | None = None,
        curve_candidates: Sequence[Candidate] | None = None,
    ) -> Self:
        """Beside the usual: `dataset` numbers the set that each prompt is from (their difficulties are kept apart),
        `other_spaces` has the same prompts' vectors elsewhere, and price and size curves are fitted on
        `curve_candidates`
        (all, by default)."""
        check_parameters(self, self._parameter_constraints)
        if table.n_outcomes == 0:
            raise DataError("there is no outcome with a quality to learn from")
        n_clusters = max(1, min(self.n_clusters, len(table) // _PROMPTS_PER_CLUSTER))
        cluster = find_clusters(table.embeddings, n_clusters, self.seed)
        spaces = {space: table.embeddings, **(other_spaces or {})}
        self._clusters = {name: Clusters.of_members(each, cluster, n_clusters) for name, each in spaces.items()}
        self.space_ = space
        skills = fit_skills(
            table.quality,
            table.output_tokens,
            cluster,
            np.zeros(len(table), dtype=np.int64) if dataset is None else dataset,
            n_clusters,
            deviation_std=self.deviation_std,
        )
        self.skills_ = _rounded(skills)
        self.known_ = tuple(candidates)
        self.curves_ = self._fit_curves(self.known_ if curve_candidates is None else curve_candidates)
        self._begin(_digest(self.skills_, self._clusters))
        return self.set_candidates(candidates)

    def update(self, outcomes: Sequence[Outcome], embeddings: Embeddings, *, space: str | None = None) -> Self:
        names = [candidate.name for candidate in self.candidates_]
        table = OutcomeTable.from_outcomes(outcomes, embeddings, names)
        if len(table) == 0:
            return self
        memberships = self._memberships(table.embeddings, space)
        row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(outcome.prompt for outcome in outcomes))}
        with self._lock:
            slots = dict(zip(names, self._pool.columns.tolist(), strict=True))
            for outcome in outcomes:
                self._beliefs.learn(
                    slots[outcome.candidate],
                    memberships[row_of[outcome.prompt]],
                    outcome.quality,
                    outcome.completion_tokens,
                )
            self._n_updates += 1
            self._refresh()
        return self

    def add_candidate(
        self,
        candidate: Candidate,
        outcomes: Sequence[Outcome] = (),
        embeddings: Embeddings | None = None,
    ) -> Self:
        if any(candidate.name == known.name for known in self.candidates_):
            raise RouterError(f"there is a candidate {candidate.name!r} already; teach it with update")
        return self.set_candidates([*self.candidates_, candidate]).update(outcomes, embeddings or {})

    def set_candidates(self, candidates: Sequence[Candidate]) -> Self:
        check_pool(candidates)
        with self._lock:
            slots: list[int] = []
            for candidate in candidates:
                slots.append(self._slot(candidate, slots))
                self._beliefs.set_prior(slots[-1], self.prior_of(candidate))
            self._pool = Pool(candidates, np.array(slots, dtype=np.int64))
            self.candidates_ = self._pool.candidates
            self._refresh()
        return self

    def estimate(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], *, space: str | None = None
    ) -> Estimates:
        memberships = self._memberships(embeddings, space)
        quality, std, output_tokens, pool = self._posterior
        tokens = memberships @ output_tokens.T
        # Memberships sum to 1 but for rounding.
        mixed = np.clip(memberships @ quality.T, 0.0, 1.0)
        return Estimates(mixed, memberships @ std.T, tokens, pool.cost_usd(prompt_tokens, tokens))

    @property
    def version(self) -> str:
        return f"{self._digest}-{self._n_updates}"

    @property
    def spaces(self) -> tuple[str, ...]:
        return (self.space_, *(name for name in self._clusters if name != self.space_))

    def summary(self) -> dict[str, Any]:
        return super().summary() | {
            "clusters": len(self.skills_.share),
            "known_models": len(self.known_),
            "feedback": float(self._beliefs.count.sum()),
        }

    # Priors

    def prior_of(self, candidate: Candidate) -> Prior:
        """What is believed of a candidate before any feedback.

        A known model has its own shape over the clusters and its own level; an unknown one the average shape and a
        guessed level. A `quality_prior` takes the place of either level.
        """
        skills = self.skills_
        known = self._known_column(candidate)
        shift, token_factor = EFFORTS.get(candidate.effort or "", (0.0, 1.0))
        if candidate.quality_prior is not None:
            level, std, strength = self._level_for(candidate.quality_prior, known), STATED_STD, GUESSED_STRENGTH
        elif known is not None:
            level, std, strength = float(skills.skill[known]) + shift, KNOWN_STD, KNOWN_STRENGTH
        else:
            guess = self.curves_.guess(candidate)
            level, strength = guess.skill + shift, GUESSED_STRENGTH
            p = float(sigmoid(np.array(level)))
            std = guess.std * p * (1.0 - p)
        by_cluster = self._quality_at(level, known)
        tokens = np.exp(self._log_tokens(known) + skills.cluster_log_tokens) * token_factor
        return Prior(self._with_average(by_cluster), std, strength, self._with_average(np.maximum(tokens, 1.0)))

    def _known_column(self, candidate: Candidate) -> int | None:
        names = [known.name for known in self.known_]
        found = match_name(candidate, names)
        column = None if found is None else names.index(found)
        return None if column is None or np.isnan(self.skills_.skill[column]) else column

    def _quality_at(self, level: float, known: int | None) -> Floats:
        """By cluster, of shape (k,), for a skill of `level` and the shape of a known model or of an average one."""
        skills = self.skills_
        if known is None:
            return sigmoid(level + skills.difficulty + skills.slope * (level - skills.mean_skill))
        return sigmoid(level + skills.difficulty + skills.deviation[known])

    def _level_for(self, quality: float, known: int | None) -> float:
        """The level at which the average quality over prompts is `quality`, by bisection."""
        low, high = -_SKILL_LIMIT, _SKILL_LIMIT
        for _ in range(50):
            middle = (low + high) / 2
            if float(self.skills_.share @ self._quality_at(middle, known)) < quality:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _log_tokens(self, known: int | None) -> float:
        told = self.skills_.log_tokens[np.isfinite(self.skills_.log_tokens)]
        if known is not None and np.isfinite(self.skills_.log_tokens[known]):
            return float(self.skills_.log_tokens[known])
        return float(told.mean()) if len(told) else float(np.log(DEFAULT_OUTPUT_TOKENS))

    def _with_average(self, by_cluster: Floats) -> Floats:
        return np.append(by_cluster, self.skills_.share @ by_cluster)

    def _fit_curves(self, candidates: Sequence[Candidate]) -> SkillCurves:
        skill_of = {c.name: s for c, s in zip(self.known_, self.skills_.skill.tolist(), strict=True) if not np.isnan(s)}
        chosen = [candidate for candidate in candidates if candidate.name in skill_of]
        mean_skill = sum(skill_of.values()) / len(skill_of)
        return SkillCurves.fit(chosen, [skill_of[candidate.name] for candidate in chosen], mean_skill)

    # State

    def _begin(self, digest: str) -> None:
        self._beliefs = Beliefs(len(self.skills_.share) + 1)
        self._digest = digest
        self._n_updates = 0

    def _slot(self, candidate: Candidate, taken: Sequence[int]) -> int:
        """Where feedback on this candidate is kept; one model at two efforts has two slots."""
        beliefs = self._beliefs
        found = match_name(candidate, beliefs.names)
        if found is None:
            return beliefs.add(candidate.name)
        slot = beliefs.names.index(found)
        if slot not in taken:
            return slot
        copy = beliefs.add(candidate.name)
        beliefs.copy_feedback(slot, copy)
        return copy

    def _refresh(self) -> None:
        """One assignment, so that an estimate in another thread sees either all of an update or nothing."""
        self._posterior = (*self._beliefs.posterior(self._pool.columns.tolist()), self._pool)

    def _memberships(self, embeddings: Matrix, space: str | None) -> Floats:
        clusters = self._clusters.get(self.space_ if space is None else space)
        self._check_space(embeddings, -1 if clusters is None else clusters.centres.shape[1], space)
        assert clusters is not None
        return clusters.memberships(embeddings)

    def _set_first_space(self, space: str) -> None:
        if space not in self._clusters:
            raise RouterError(
                f"the prior that ships has no centres for vectors of {space!r}, only for {', '.join(self._clusters)}. "
                "Fit a router for this embedder with `atoll fit`"
            )
        self.space_ = space

    def _take_feedback(self, state: Path) -> None:
        """Go on from what was learned. Of another release's prior only the level is kept: its clusters were others."""
        if read_about(state, self.name)["digest"] == self._digest:
            about, tensors = read_artefact(state, self.name)
            with _damage_told(state):
                self._restore_feedback(about, tensors)
            return
        other = type(self).load(state)
        for slot, name in enumerate(other._beliefs.names):
            mine = self._beliefs.add(name)
            self._beliefs.count[mine, -1] = other._beliefs.count[slot].sum()
            self._beliefs.surprise[mine, -1] = other._beliefs.surprise[slot].sum()
            self._beliefs.token_count[mine] = other._beliefs.token_count[slot]
            self._beliefs.token_ratio[mine] = other._beliefs.token_ratio[slot]
        self._n_updates = other._n_updates

    # On disk

    def save(self, path: Path) -> None:
        with self._lock:
            beliefs, skills = self._beliefs, self.skills_
            tensors: dict[str, npt.NDArray[Any]] = {
                **{f"centres.{name}": each.centres.astype(np.float16) for name, each in self._clusters.items()},
                **{f"skills.{field}": getattr(skills, field).astype(np.float32) for field in _SKILL_FIELDS},
                **{f"beliefs.{field}": getattr(beliefs, field) for field in _FEEDBACK_FIELDS},
                "slots": self._pool.columns,
            }
            about = {
                "space": self.space_,
                "near_similarity": {name: each.near_similarity for name, each in self._clusters.items()},
                "known": candidates_to_json(self.known_),
                "mean_skill": skills.mean_skill,
                "curves": self.curves_.to_json(),
                "candidates": candidates_to_json(self.candidates_),
                "slot_names": beliefs.names,
                "parameters": {name: getattr(self, name) for name in self._parameter_constraints},
                "n_updates": self._n_updates,
                "digest": self._digest,
            }
        write_artefact(path, self.name, about, tensors)

    @classmethod
    def load(cls, path: Path) -> Self:
        about, tensors = read_artefact(path, cls.name)
        with _damage_told(path):
            router = cls(**about["parameters"])
            router._clusters = {
                name: Clusters(tensors[f"centres.{name}"].astype(np.float32), float(near))
                for name, near in about["near_similarity"].items()
            }
            router.space_ = str(about["space"])
            stored = {name: tensors[f"skills.{name}"].astype(np.float64) for name in _SKILL_FIELDS}
            router.skills_ = Skills(mean_skill=float(about["mean_skill"]), **stored)
            router.known_ = candidates_from_json(about["known"])
            router.curves_ = SkillCurves.from_json(about["curves"])
            router._begin(str(about["digest"]))
            router._restore_feedback(about, tensors)
            router._pool = Pool(candidates_from_json(about["candidates"]), tensors["slots"])
            router.set_candidates(router._pool.candidates)
        return router

    def _restore_feedback(self, about: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        beliefs = Beliefs(len(self.skills_.share) + 1)
        for name in about["slot_names"]:
            beliefs.add(name)
        for field in _FEEDBACK_FIELDS:
            if tensors[f"beliefs.{field}"].shape != getattr(beliefs, field).shape:
                raise ValueError(f"{field} has shape {tensors[f'beliefs.{field}'].shape}")
            setattr(beliefs, field, tensors[f"beliefs.{field}"].copy())
        self._beliefs = beliefs
        self._n_updates = int(about["n_updates"])


def _digest(skills: Skills, clusters: Mapping[str, Clusters]) -> str:
    digest = hashlib.sha256()
    for field in _SKILL_FIELDS:
        digest.update(getattr(skills, field).astype(np.float32).tobytes())
    for name, each in clusters.items():
        digest.update(name.encode() + each.centres.tobytes())
    return digest.hexdigest()[:12]


def _rounded(skills: Skills) -> Skills:
    """As they are stored, so that a loaded router answers exactly as the fitted one."""
    stored = {name: getattr(skills, name).astype(np.float32).astype(np.float64) for name in _SKILL_FIELDS}
    return Skills(mean_skill=skills.mean_skill, **stored)


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"the prior router in {str(path)!r} is damaged ({error!r}). Remove it: what it had learned is lost, the "
            "prior that ships takes its place"
        ) from error
