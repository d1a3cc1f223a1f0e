"""A study: its trials, kept by Optuna in SQLite or in a journal. The process of the sweep is its only writer.

Optuna has no paused trials. Those of successive halving are running for Optuna, and `paused` in their attributes, also
when the search is over: a longer one may continue them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.errors import SearchError
from paceline.optim.schedules import Best
from paceline.run.study_folder import StudyFolder
from paceline.tools.search.space import Parameter, choose, grid_size, import_optuna, parse_space, quiet
from paceline.tools.search.trial import Trial, TrialStatus

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

FORMAT = 1
_FACTS = "paceline"  # the attribute of Optuna's trials that holds ours
_TRIALS = 20
# A study goes on only with the same values of these.
_FIXED = ("sampler", "seed", "pruner", "eta", "rungs", "metric", "mode", "storage")


class Study:
    """The trials of a search. `paceline.sweep()` returns one; `Study.open` is for trials in a loop of one's own.

    The examples of the methods continue the one below.

    Args:
        folder: where it is stored
        section: the `sweep:` section of a recipe
        recipe: that trials vary; empty for a function

    Raises:
        SearchError: `search.no-space`, `search.bad-space`, `search.other-study`, `search.no-optuna`

    Example:
        >>> import paceline
        >>> study = paceline.Study.open("mine", {"lr": "log(1e-5, 1e-2)"}, trials=3)
        >>> while not study.is_full:
        ...     trial = study.ask()
        ...     study.tell(trial.number, abs(trial.params["lr"] - 1e-3))
        >>> study.best.value == min(trial.value for trial in study.trials())
        True
    """

    def __init__(self, folder: StudyFolder, section: SweepSection, recipe: Mapping[str, Any]) -> None:
        self.folder, self.recipe = folder, recipe
        self.space: list[Parameter] = parse_space(section.space)
        self.section = section.model_copy(update={"space": json.loads(json.dumps(section.space))})  # as it is stored
        if not self.space:
            raise SearchError("no-space", "The search space is empty.")
        self.minimizes = Best(section.metric, section.mode).mode == "min"
        self._storage, self._study = self._open()

    @classmethod
    def open(cls, name: str, space: Mapping[str, Any], **settings: Any) -> Study:
        """A new study, or an existing one of the same search.

        Args:
            name: name or path of the study
            space: how each parameter varies, as for `paceline.sweep`
            settings: keys of a recipe's `sweep:` section, such as `trials=20`

        Returns:
            The study.

        Raises:
            SearchError: `search.no-space`, `search.bad-space`, `search.other-study`

        Example:
            >>> len(paceline.Study.open("mine", {"lr": "log(1e-5, 1e-2)"}, trials=3).trials())
            3
        """
        return cls(StudyFolder.of(name), read_section(space, settings), {})

    @classmethod
    def load(cls, folder: StudyFolder) -> Study:
        """An existing study.

        Args:
            folder: of the study, such as `study.folder`

        Returns:
            The study.

        Raises:
            SearchError: `search.no-study`

        Example:
            >>> paceline.Study.load(study.folder).best == study.best
            True
        """
        if not folder.exists:
            raise SearchError("no-study", f"There is no study at {folder.short}.")
        settings = folder.read_settings()
        return cls(folder, SweepSection(**settings["sweep"]), settings["recipe"])

    @property
    def size(self) -> int:
        """The number of trials; a grid has no more than cells."""
        if self.section.sampler != "grid":
            return self.section.trials or _TRIALS
        cells = grid_size(self.space)
        return min(self.section.trials or cells, cells)

    @property
    def is_full(self) -> bool:
        """Whether it has all of its trials."""
        return len(self._frozen()) >= self.size

    def trials(self) -> list[Trial]:
        """All trials, by number.

        Returns:
            Trials with `number`, `params`, `state`, `value` and more.

        Example:
            >>> [trial.state for trial in study.trials()]
            ['complete', 'complete', 'complete']
        """
        return [self._trial(each) for each in self._frozen()]

    @property
    def best(self) -> Trial | None:
        """The trial with the best value, of those that have completed."""
        done = [each for each in self.trials() if each.state == "complete" and each.value is not None]
        return min(done, key=lambda each: self._order(each.value), default=None)

    def ranked(self) -> list[Trial]:
        """Completed trials before others, the best first.

        Returns:
            All trials.

        Example:
            >>> study.ranked()[0] == study.best
            True
        """
        return sorted(self.trials(), key=lambda each: (each.state != "complete", self._order(each.value), each.number))

    def ask(self) -> Trial:
        """A new trial, with its parameters.

        Returns:
            The trial: `number`, and `params` by name.

        Example:
            >>> trial = study.ask()
            >>> sorted(trial.params)
            ['lr']
        """
        from optuna.trial import TrialState, create_trial

        known = [self._as_known(each) for each in self._frozen()]
        number = len(known)
        params, kept = choose(self.section, self.space, number, self.minimizes, known)
        template = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions={parameter.key: parameter.distribution for parameter in self.space},
            system_attrs=dict(kept),
        )
        with quiet():
            self._storage.create_new_trial(self._id, template_trial=template)
        return self.trials()[number]

    def tell(self, number: int, value: float | None = None, *, state: TrialStatus = "complete") -> None:
        """The result of a trial.

        Args:
            number: of the trial
            value: of the metric; a failed trial has none
            state: `"complete"`, `"pruned"` or `"failed"`

        Raises:
            SearchError: `search.no-value`: a completed trial needs a finite one; `search.other-trial`: it has ended

        Example:
            >>> study.tell(study.ask().number, state="failed")
        """
        from optuna.trial import TrialState

        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        if (state == "complete" and value is None) or (value is not None and not math.isfinite(value)):
            shown = "no value" if value is None else f"the value {value}"
            raise SearchError("no-value", f"Trial {number} has {shown} of {self.section.metric!r}.")
        known = self.trials()
        if not 0 <= number < len(known) or known[number].has_ended:
            what = "has ended already" if 0 <= number < len(known) else "was not asked for"
            raise SearchError("other-trial", f"Trial {number} {what}.")
        with quiet():
            values = None if value is None else [value]
            self._storage.set_trial_state_values(self._trial_id(number), states[state], values)

    def report(self, number: int, step: int, value: float) -> None:
        """A value on the way. One that is not finite is left out.

        Args:
            number: of the trial
            step: at which it has the value
            value: of the metric

        Example:
            >>> study.report(study.ask().number, step=10, value=0.5)
        """
        if math.isfinite(value):
            with quiet():
                self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)

    def should_prune(self, number: int) -> bool:
        """Whether a trial is worse than the median of the others at its last step.

        Args:
            number: of the trial

        Returns:
            Always False without `pruner="median"`.

        Example:
            >>> study.should_prune(study.ask().number)
            False
        """
        import optuna

        if self.section.pruner != "median":
            return False
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0)
        return pruner.prune(self._study, self._frozen()[number])

    def update(self, number: int, **attributes: Any) -> None:
        """Keep facts about a trial: attributes of its record. All of them or none, wherever this process is killed.

        Args:
            number: of the trial
            attributes: such as `steps=100`

        Example:
            >>> number = study.ask().number
            >>> study.update(number, steps=100)
            >>> study.trials()[number].steps
            100
        """
        known = self._frozen()[number].user_attrs.get(_FACTS, {})
        with quiet():
            self._storage.set_trial_user_attr(self._trial_id(number), _FACTS, {**known, **attributes})

    def require_success(self) -> None:
        """Raise if trials have ended, and all of them failed.

        Raises:
            SearchError: `search.all-failed`

        Example:
            >>> study.require_success()
        """
        ended = [each for each in self.trials() if each.has_ended or each.rung_values]
        if ended and all(each.state == "failed" for each in ended):
            raise SearchError(
                "all-failed",
                f"All {len(ended)} trials failed; the first one: {ended[0].verdict}",
                fix=f"see {self.folder.trial_output(ended[0].number)}",
            )

    def importances(self) -> dict[str, float]:
        """How much of the variation of the metric each parameter explains.

        Returns:
            A share by parameter; empty if there are too few trials.

        Example:
            >>> isinstance(study.importances(), dict)
            True
        """
        import optuna

        with quiet():
            try:
                found = optuna.importance.get_param_importances(
                    self._study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
                )
            except (ValueError, RuntimeError):
                return {}
        return dict(found)

    @property
    def optuna_study(self) -> optuna.Study:
        """For Optuna's own functions, such as its plots."""
        return self._study

    def _order(self, value: float | None) -> float:
        return float("inf") if value is None else value if self.minimizes else -value

    def _open(self) -> tuple[BaseStorage, optuna.Study]:
        optuna = import_optuna()
        self._require_same()
        self.folder.create()
        with quiet():
            storage: BaseStorage
            if self.section.storage == "journal":
                backend = optuna.storages.journal.JournalFileBackend(str(self.folder.journal))
                storage = optuna.storages.JournalStorage(backend)
            else:
                # SQLite decodes the path: it may contain characters that have a meaning in a URL.
                storage = optuna.storages.RDBStorage(f"sqlite:///file:{quote(str(self.folder.database))}?uri=true")
            study = optuna.create_study(
                study_name="sweep",
                storage=storage,
                direction="minimize" if self.minimizes else "maximize",
                load_if_exists=True,
            )
        settings = {"format": FORMAT, "sweep": self.section.model_dump(), "recipe": dict(self.recipe)}
        if not self.folder.exists or self.folder.read_settings() != settings:
            self.folder.write_settings(settings)
        return study._storage, study  # with a cache of ended trials

    def _require_same(self) -> None:
        """An existing study goes on, if it is the same search."""
        if not self.folder.exists:
            return
        before = self.folder.read_settings()
        now = {"space": self.section.space, **{key: getattr(self.section, key) for key in _FIXED}}
        changed = [f"sweep.{key}" for key, value in now.items() if before["sweep"].get(key) != value]
        if before["recipe"] != self.recipe:
            changed.append("the recipe")
        if changed:
            raise SearchError(
                "other-study", f"{self.folder.short} is the study of another search: {', '.join(changed)} changed."
            )

    @property
    def _id(self) -> int:
        return self._study._study_id

    def _frozen(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._id, deepcopy=False)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _trial(self, frozen: FrozenTrial) -> Trial:
        kept = dict(frozen.user_attrs.get(_FACTS, {}))
        states: dict[str, TrialStatus] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        state = states.get(frozen.state.name, "paused" if kept.pop("paused", False) else "running")
        kept.pop("paused", None)
        decoded = {each.key: each.decode(frozen.params[each.key]) for each in self.space if each.key in frozen.params}
        last = frozen.values[0] if frozen.values else frozen.intermediate_values.get(frozen.last_step or 0)
        rung_values = {int(rung): value for rung, value in kept.pop("rung_values", {}).items()}
        values = dict(frozen.intermediate_values)
        return Trial(frozen.number, decoded, state, last, values, rung_values=rung_values, **kept)

    def _as_known(self, frozen: FrozenTrial) -> FrozenTrial:
        """For a sampler, which knows no paused trials: these are pruned."""
        from optuna.trial import TrialState, create_trial

        if not frozen.user_attrs.get(_FACTS, {}).get("paused") or frozen.state.is_finished():
            return frozen
        return create_trial(
            state=TrialState.PRUNED,
            params=frozen.params,
            distributions=frozen.distributions,
            intermediate_values=frozen.intermediate_values,
            system_attrs=frozen.system_attrs,
        )


def read_section(space: Mapping[str, Any], settings: Mapping[str, Any]) -> SweepSection:
    """The section for keyword arguments. Unknown ones are errors with a code."""
    return Config.from_dict({"sweep": {**settings, "space": dict(space)}}, origin="the caller").sweep
