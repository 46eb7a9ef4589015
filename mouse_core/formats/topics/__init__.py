"""Recordings of robots, MCAP files and bags of ROS 2: topics as columns, their messages brought to one clock."""

from mouse_core.formats.topics.layout import TopicLayout
from mouse_core.formats.topics.reading import read_topics
from mouse_core.formats.topics.recordings import Topic, is_recording, topics_in

__all__ = ["Topic", "TopicLayout", "is_recording", "read_topics", "topics_in"]
