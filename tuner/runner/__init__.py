"""Runners execute and time jobs: `vulkan` on a device, `worker` in another process, `fake` on none.

Import the one you need (`from tuner.runner.vulkan import VulkanRunner`); this package imports none,
so that `protocol` can be had without Vulkan.
"""
