"""From values to pipelines: a trial is rendered, compiled and prepared here, on any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.errors import IllegalVariantError, UsageError
from tuner.evaluate.building import (
    Built,
    CompileMemo,
    Render,
    RenderedPass,
    RenderMemo,
    Scalars,
    SpirvCompiler,
    compile_passes,
    named,
    render_passes,
)
from tuner.evaluate.residents import ResidentCases
from tuner.evaluate.trials import MADE_BADLY, RAN_BADLY, Draft, PreparedTrial, failure_of
from tuner.kernels.base import Candidate, Family, ValidationCase, Values
from tuner.kernels.space import reasons
from tuner.problems import Problem
from tuner.records import Record
from tuner.runner.protocol import Runner


class Preparation:
    """Makes trials of one family on one problem; every method may be called from any thread.

    Args:
        runner, compiler: what trials are prepared on and compiled with.
        family, problem: what is tried, and for what.
        cases: what knows the scalars of validation cases.
        render: stands in for `tuner.templates.render` in tests.
    """

    def __init__(
        self,
        runner: Runner,
        compiler: SpirvCompiler,
        family: Family,
        problem: Problem,
        *,
        cases: ResidentCases,
        render: Render,
    ) -> None:
        self._runner, self._compiler = runner, compiler
        self._family, self._problem = family, problem
        self._info, self._cases, self._render = runner.info, cases, render
        self.validation_cases = family.validation_cases(problem)
        self._current: dict[str, bool] = {}

    def draft(self, values: Values) -> Draft:
        """Render a variant and name it.

        Raises:
            IllegalVariantError: it is not legal here; says why.
        """
        render, compiler = RenderMemo(self._render), self._compiler.identity
        found = named(self._family, values, self._problem, self._info, compiler, render=render)
        return Draft(
            candidate=found.candidate,
            passes=found.passes,
            key=found.key,
            render=render,
            broken=failure_of(found.broken) if found.broken else None,
        )

    def is_current(self, record: Record) -> bool:
        """Whether a record of this problem tells of a kernel that could be made today.

        Not so if sources, compiler or space have changed since, or it is of another card.
        """
        if record.variant not in self._current:
            try:
                same = self.draft(record.values).key == record.variant
            except IllegalVariantError:
                same = False
            self._current[record.variant] = same
        return self._current[record.variant]

    def prepare(self, draft: Draft) -> PreparedTrial:
        """Compile a variant and make its pipelines, for timing and for validation.

        The cases run the same kernels (`Family.validated_as`); those on which the variant is not
        legal are left out, and one that is legal on none of them fails.
        """
        if draft.broken is not None:
            return PreparedTrial(draft=draft, failure=draft.broken)
        built: list[Built] = []
        try:
            cases = self._legal_cases(draft.candidate)
            built.extend(self._builds(draft, cases))
            prepared = self._runner.prepare([each.job for each in built])
        except (*MADE_BADLY, *RAN_BADLY, UsageError) as error:
            return PreparedTrial(
                draft=draft,
                failure=failure_of(error, making=True),
                compile_seconds=sum(each.compile_seconds for each in built),
            )
        timed, *others = built
        return PreparedTrial(
            draft=draft,
            job=timed.job,
            case_jobs=tuple(zip(cases, (each.job for each in others), strict=True)),
            compile_seconds=sum(each.compile_seconds for each in built),
            pipeline_seconds=sum(each.pipeline_seconds for each in prepared),
            statistics=prepared[0].statistics,
        )

    def _builds(self, draft: Draft, cases: Mapping[ValidationCase, Values]) -> Iterator[Built]:
        """The job that is timed, then those of the cases, each kernel compiled once.

        Raises:
            TemplateError, CompileError: one has no kernel.
        """
        compiler = CompileMemo(self._compiler)
        yield compile_passes(self._family, draft.candidate, draft.passes, compiler)
        for case, values in cases.items():
            candidate = Candidate(values, case.problem, self._info)
            passes = _render(self._family, candidate, self._cases.scalars(case), draft.render)
            yield compile_passes(self._family, candidate, passes, compiler)

    def _legal_cases(self, candidate: Candidate) -> dict[ValidationCase, Values]:
        """The cases on which the variant is legal, each with the values it has there.

        Raises:
            UsageError: it is legal on none, so that nothing would prove its answers right.
        """
        legal: dict[ValidationCase, Values] = {}
        refused = ""
        for case in self.validation_cases:
            values = self._family.validation_values(candidate, case)
            against = reasons(self._family, values, case.problem, self._info)
            if not against:
                legal[case] = values
            elif not refused:
                refused = f"; on {case.name} because {against[0]}"
        if not legal:
            raise UsageError(f"not legal on any validation case, so never proved right{refused}")
        return legal


def _render(
    family: Family, candidate: Candidate, scalars: Scalars, render: Render
) -> tuple[RenderedPass, ...]:
    return render_passes(
        family,
        candidate.values,
        candidate.problem,
        candidate.device,
        scalars=scalars,
        render=render,
    )
