"""TokenAugmenter, a class that keeps a state and calls ``draw`` and ``apply``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from mouse_core._base.tracing import refuse_traced
from mouse_core.augment.config import AugmentTokensConfig
from mouse_core.augment.draws import Draws, draw_shared, with_masks
from mouse_core.augment.images import ImageShapes, check_choice, shape_of_images
from mouse_core.augment.transform import apply, check_masked_as
from mouse_core.errors import ConfigError, SchemaError, StateError
from mouse_core.randomness import Key, Purpose, check_seed

T = TypeVar("T")

_STATE_KEYS = {"seed", "updates", "calls"}


class Augmenter(Generic[T]):
    """Base class of the augmenters of all frameworks; see ``TokenAugmenter``.

    An adapter overrides ``_read`` and ``_write``. If draws must be copied to a device, the adapter also overrides
    ``_checked_device``, ``_place`` and ``_checks``.
    """

    def __init__(
        self,
        augment: AugmentTokensConfig,
        max_num_actions: int = 0,
        max_num_obs_discrete: int = 0,
        device: Any = None,
        seed: int = 0,
        *,
        image_shape: ImageShapes = None,
        validate: bool | None = None,
        batch_dims: int = 2,
    ) -> None:
        if not isinstance(augment, AugmentTokensConfig):
            raise ConfigError(f"augment: expected an AugmentTokensConfig, found {augment!r}")
        self._device = self._checked_device(device)
        self._config = augment.with_sizes(max_num_actions=max_num_actions, max_num_obs_discrete=max_num_obs_discrete)
        self._seed = check_seed(seed)
        self._image_shape = image_shape
        self._validate = validate
        check_choice("augmenter: batch_dims", batch_dims, (1, 2))
        self._batch_dims = batch_dims
        self._updates = 0
        self._calls = 0
        self._shared: tuple[tuple[int, int], Draws] | None = None

    @property
    def augment(self) -> AugmentTokensConfig:
        """The configuration of the augmentations."""
        return self._config

    def update_augmentations(self, step_stream: T) -> None:
        """Draw permutations, scales, shifts and crops for a batch of this shape; later calls of the augmenter use these
        draws until the next update.

        Raises:
            ConfigError: A needed number of actions or states is unknown, a crop is larger than the image, or the batch
                lacks a field that ``by_field`` names.
            SchemaError: The batch lacks the batch axes ``[B, S]`` (or ``[B]``).
        """
        if self._config.active:
            fields = self._read(step_stream)
            refuse_traced("update_augmentations")
            self._shared = self._draw(fields, self._updates)
        self._updates += 1
        self._calls = 0

    def next_draws(self, step_stream: T) -> Draws:
        """Return the draws for the next batch, as an argument for ``apply`` (also inside ``jax.jit``); each call draws
        new masks.

        Raises:
            StateError: ``update_augmentations`` has not been called.
            SchemaError: ``(B, S)`` differs between this batch and the batch of the last update.
        """
        fields = self._read(step_stream)
        refuse_traced("next_draws")
        if not self._updates:
            raise StateError(
                "augmenter: expected a call of update_augmentations(batch) before the first augmentation, found none"
            )
        if self._shared is None:  # a state was loaded before
            self._shared = self._draw(fields, self._updates - 1)
        shape, shared = self._shared
        if (found := self._shape(fields)) != shape:
            raise SchemaError(
                f"augmenter: expected a batch of shape {list(shape)}, as in update_augmentations, "
                f"found shape {list(found)}"
            )
        draws = with_masks(shared, self._config, self._key(self._updates - 1, self._calls), shape, fields=set(fields))
        for name, fill in draws.fills.items():
            check_masked_as(name, fill, fields[name])
        self._calls += 1
        return self._place(draws, fields)

    def __call__(self, step_stream: T) -> T:
        """Return the augmented batch. The input is not modified; if nothing is augmented, the input itself is returned.

        Raises:
            StateError, SchemaError: See ``next_draws``.
            DataError: An action, done code or state is out of range, and codes are checked.
        """
        if not self._config.active:
            return step_stream
        fields = self._read(step_stream)
        augmented = apply(
            fields,
            self.next_draws(step_stream),
            image_shape=self._image_shape,
            validate=self._checks(fields),
            batch_dims=self._batch_dims,
        )
        if augmented is fields:
            return step_stream
        return self._write(
            step_stream, {name: value for name, value in augmented.items() if value is not fields.get(name)}
        )

    def state_dict(self) -> dict[str, int]:
        """Return the state, with which a resumed run continues. The state consists of integers and is equal in every
        framework.
        """
        return {"seed": self._seed, "updates": self._updates, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position and the seed from ``state``.

        Raises:
            StateError: ``state`` is not a state of an augmenter; the augmenter is unchanged.
        """
        if set(state) != _STATE_KEYS or any(type(value) is not int or value < 0 for value in state.values()):
            raise StateError(f"state: expected {sorted(_STATE_KEYS)} as integers of 0 or more, found {dict(state)}")
        try:
            self._seed = check_seed(state["seed"])
        except ConfigError as error:
            raise StateError(f"state: {error}") from error
        self._updates, self._calls = state["updates"], state["calls"]
        self._shared = None

    def _draw(self, fields: Mapping[str, Any], update: int) -> tuple[tuple[int, int], Draws]:
        config = self._config
        if "q_star" in fields and not config.max_num_actions:
            config = config.with_sizes(max_num_actions=fields["q_star"].shape[-1])
        config.check_named(dict.fromkeys(fields, ""))
        shapes = {name: shape_of_images(self._image_shape, name) for name in config.redrawn & fields.keys()}
        shapes |= {name: tuple(fields[name].shape[-3:]) for name in shapes if fields[name].ndim >= self._batch_dims + 3}
        image_shape = {name: shape for name, shape in shapes.items() if shape is not None}
        shape = self._shape(fields)
        shared = draw_shared(config, self._key(update, 0), shape, fields=set(fields), image_shape=image_shape)
        return shape, self._place(shared, fields)

    def _shape(self, fields: Mapping[str, Any]) -> tuple[int, int]:
        """Return ``(B, S)`` of a batch; ``(B, 1)`` if the batch has no axis of steps."""
        for name, values in fields.items():
            if values.ndim < self._batch_dims:
                axes = "[B, S, ...]" if self._batch_dims == 2 else "[B, ...]"
                raise SchemaError(f"augment: {name}: expected {axes}, found shape {tuple(values.shape)}")
            return int(values.shape[0]), int(values.shape[1]) if self._batch_dims == 2 else 1
        raise SchemaError("augment: expected a batch with fields, found an empty batch")

    def _key(self, update: int, call: int) -> Key:
        return Key(self._seed, Purpose.AUGMENT, update, call)

    def _read(self, step_stream: T) -> Mapping[str, Any]:
        """Return the arrays of a batch by field."""
        raise NotImplementedError

    def _write(self, step_stream: T, changed: Mapping[str, Any]) -> T:
        """Return a new batch with the fields of ``step_stream``, in which the fields ``changed`` are replaced or
        added.
        """
        raise NotImplementedError

    def _checked_device(self, device: Any) -> Any:
        """Return ``device`` as a device of the framework; raise ConfigError if ``device`` is invalid."""
        return device

    def _checks(self, fields: Mapping[str, Any]) -> bool | None:
        """Return whether ``apply`` checks codes; None means the default of ``apply``."""
        return self._validate

    def _place(self, draws: Draws, fields: Mapping[str, Any]) -> Draws:
        """Return the draws on the device of ``fields``; draws on another device are copied."""
        return draws


class TokenAugmenter(Augmenter[dict[str, npt.NDArray[Any]]]):
    """Augments batches of NumPy arrays, ``{field: [B, S, ...]}``.

    ``update_augmentations(batch)`` draws permutations, scales, shifts and crops. Every later call applies these draws
    to a batch, with new masks. ``mouse_torch`` and ``mouse_jax`` have a class of the same name with the same arguments;
    with the same seed, all three classes draw the same random numbers.

    Args:
        augment: The augmentations.
        max_num_actions: Number of actions; 0: the number in ``augment``, or the number of columns of ``q_star``.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: the number in ``augment``.
        device: None or "cpu".
        seed: An integer in ``[0, 2**64)``.
        image_shape: The shape ``(H, W, C)`` of a flattened ``obs_image``, or a dict from field to shape for several
            fields; required for crops.
        validate: Whether actions, done codes and states that are out of range raise DataError; None: True.
        batch_dims: Number of batch axes: 2, or 1 for batches ``[B, ...]`` without steps, as from a source with
            ``windows=``.

    Raises:
        ConfigError: An argument has a wrong type.

    Example:
        >>> import numpy as np
        >>> from mouse_core import AugmentScalarSpec, AugmentTokensConfig, TokenAugmenter
        >>> batch = {"action": np.array([[0, 2]]), "reward": np.ones((1, 2), np.float32)}
        >>> augmenter = TokenAugmenter(AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0)))
        >>> augmenter.update_augmentations(batch)
        >>> augmenter(batch)["reward"]
        array([[2., 2.]], dtype=float32)
    """

    def _checked_device(self, device: Any) -> Any:
        if device not in (None, "cpu"):
            raise ConfigError(f"device: expected None or 'cpu' for NumPy batches, found {device!r}")
        return device

    def _read(self, step_stream: dict[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        return step_stream

    def _write(
        self, step_stream: dict[str, npt.NDArray[Any]], changed: Mapping[str, Any]
    ) -> dict[str, npt.NDArray[Any]]:
        return {**step_stream, **changed}
