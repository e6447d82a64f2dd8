// SPDX-License-Identifier: Apache-2.0

// Command wgdemo is a WireGuard gateway in user space that upgrades itself with no
// packet lost. Run it with --help.
package main

import (
	"context"
	"os"

	"instar/wgdemo"
)

func main() {
	os.Exit(wgdemo.Main(context.Background(), os.Args[1:], wgdemo.Env{}))
}
