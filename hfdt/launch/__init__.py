"""Starting ranks with horovodrun."""
