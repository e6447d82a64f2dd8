// SPDX-License-Identifier: Apache-2.0

// Package vmtest runs a program, usually a test binary, under another Linux: a kernel
// of Debian in a virtual machine of QEMU, whose file system is an archive in memory that
// has the program and little else.
//
// A run has three outcomes, and they are kept apart: the program ended and has an exit
// code; it did not end in time (ErrTime); or there was no run, since the kernel could
// not be had or did not start, or died (any other error).
//
// It needs the Debian packages qemu-system-x86 and xz-utils, and those of package
// instar/internal/debian.
package vmtest
