"""Recordings of robots, MCAP files and bags of ROS 2: topics as columns, their messages brought to one clock."""

from mouse_core.formats.robot_logs.reading import TopicLayout, read_robot_logs
from mouse_core.formats.robot_logs.recordings import Topic, topics_in

__all__ = ["Topic", "TopicLayout", "read_robot_logs", "topics_in"]
