"""Runners execute and time jobs on a device: `vulkan` on a real one, `fake` on none.

Import the one you need (`from tuner.runner.vulkan import VulkanRunner`); this package imports
neither, so that `protocol` can be had without Vulkan.
"""
