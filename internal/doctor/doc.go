// SPDX-License-Identifier: Apache-2.0

// Package doctor looks for what keeps Instar from working on this machine, or makes it
// lose packets: kernel, rights, mounts, settings, and the sockets at the addresses of
// groups.
//
// [Examine] runs all checks and returns their findings. It changes nothing, needs no
// privilege, and says what it could not look at. It looks at the network namespace, the
// capabilities, the control group and the mounts of the calling thread, which it does not
// leave: lock the goroutine to its thread where they differ.
//
// Each check is a function of this package and a line of the table in doctor.go.
package doctor
