// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func (a *app) manCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man FOLDER",
		Short: "Write the manual pages of all commands into a folder",
		Long: `Write the manual pages of all commands, made from this help, into a folder, such
as /usr/local/share/man/man1. It makes the folder; pages that are there are replaced.`,
		Args: args("FOLDER"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil { // #nosec G301: for everybody to read
				return fmt.Errorf("man: %w", err)
			}
			cmd.Root().DisableAutoGenTag = true // the same help, the same page
			header := doc.GenManHeader{Section: "1", Source: newBuildJSON().text(), Manual: "Instar"}
			if err := doc.GenManTree(cmd.Root(), &header, args[0]); err != nil {
				return fmt.Errorf("man: write pages: %w", err)
			}
			return nil
		},
	}
}
