// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs demonstrations in namespaces of their own, with real
// processes that leave nothing behind.
//
// [Run] starts this program again, as the sandbox, in a network namespace and
// whatever else is asked for. The processes form a tree: the sandbox gets
// SIGTERM when the command dies and ends in order; what it starts by a [Starter]
// gets SIGKILL when the sandbox dies. So nothing is left, whichever of them is
// killed. The sandbox writes what happens to a pipe that it inherits as
// descriptor 3 ([Enter]).
package sandbox
