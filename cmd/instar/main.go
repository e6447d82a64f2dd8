// SPDX-License-Identifier: Apache-2.0

// Command instar shows and changes the groups of this machine, and
// demonstrates on real traffic what they are for. "instar help" lists what it
// can do.
package main

import (
	"os"

	"instar/cmd/instar/cli"
)

func main() {
	os.Exit(cli.Main(cli.System()))
}
