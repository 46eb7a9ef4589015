"""Videos: an index of the frames in a file, exact decoding of single frames from many files, and writing of videos."""

from mouse_core.video.decoding import Decoder, FrameDecoder, decoder_version
from mouse_core.video.index import VideoIndex, index_video
from mouse_core.video.writing import VideoCodec, VideoWriter

__all__ = ["Decoder", "FrameDecoder", "VideoCodec", "VideoIndex", "VideoWriter", "decoder_version", "index_video"]
