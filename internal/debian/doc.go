// SPDX-License-Identifier: Apache-2.0

// Package debian fetches packages of any Debian release and unpacks them into
// folders, without installing anything: kernels and programs that tests want beside
// those of the machine.
//
// It is the machine's own apt that downloads and verifies, from the mirror that it is
// configured for, with package lists, a configuration and a status of our own. A Store
// keeps what was unpacked; several processes may use one at the same time. A folder of
// it can be deleted whenever nobody uses it.
package debian
