"""Images: what is accepted, decoded and encoded."""

from mouse_core.images.pixels import check_image, decode_image, decode_into, encode_png, image_shape, is_encoded

__all__ = ["check_image", "decode_image", "decode_into", "encode_png", "image_shape", "is_encoded"]
