"""Images: validation, decoding and encoding."""

from mouse_core.images.pixels import check_image, decode_image, decode_into, encode_png, image_shape, is_encoded

__all__ = ["check_image", "decode_image", "decode_into", "encode_png", "image_shape", "is_encoded"]
